"""`mindrlhf plan`: what a training job would hold and move, from its flags alone; nothing is loaded or started."""

import argparse

from mindrlhf.commands import train
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml
from mindrlhf.configs.validate import check_generating_layout, check_same_model
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_count
from mindrlhf.parallel.layout import yaml_layout
from mindrlhf.reshard.plan import plan
from mindrlhf.trainer.build import split_overrides
from mindrlhf.trainer.roles import checkpoint_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train.add_arguments(parser)
    parser.add_argument("--every_transfer", action="store_true", help="also list each transfer of the online reshard")


def run(args: argparse.Namespace) -> None:
    overrides = split_overrides(args.overrides)
    checkpoint = args.load_sft_checkpoint_train or args.load_sft_checkpoint_infer
    hf = checkpoint_config(checkpoint)
    yamls = {
        "train": load_model_yaml(args.sft_path_train, overrides["train_yaml"]),
        "infer": load_model_yaml(args.sft_path_infer, overrides["infer_yaml"]),
    }
    models = {role: yaml.architecture(hf, checkpoint or "") for role, yaml in yamls.items()}
    check_same_model(*yamls.values(), *models.values())
    check_generating_layout(yamls["infer"])
    layouts = {role: yaml_layout(yaml, models[role]) for role, yaml in yamls.items()}
    if layouts["train"].size != layouts["infer"].size:
        raise UserError(
            f"{args.sft_path_infer}: parallel_config is of {layouts['infer'].size} workers, and that of "
            f"{args.sft_path_train} of {layouts['train'].size}; both run on the same workers, so give equal products."
        )
    model = models["train"]
    print(f"model: {model.family}, {model.num_layers} layers, {parameter_count(model):,} parameters")
    for role, yaml in yamls.items():
        print(f"{role}: {_axes(yaml)} on {layouts[role].size} ranks ({yaml.path})")
    print("reshard from train to infer, float32:")
    print(plan(layouts["train"], layouts["infer"]).describe(args.every_transfer))


def _axes(yaml: ModelYaml) -> str:
    parallel = yaml.parallel
    return f"dp {parallel.data_parallel} x tp {parallel.model_parallel} x pp {parallel.pipeline_stage}"
