"""`mindrlhf sft`: supervised fine-tuning, the warm start before GRPO."""

import argparse
from pathlib import Path

from mindrlhf.backend.process.launch import started_workers
from mindrlhf.checkpoint.adapted import with_adapters
from mindrlhf.checkpoint.open import checkpoint_config, open_tokenizer
from mindrlhf.commands.train import add_model_arguments
from mindrlhf.configs.loading import load_sft_config
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.configs.validate import check_dropout, check_sft
from mindrlhf.run.outputs import lock_outputs, prepare_outputs
from mindrlhf.trainer.check import split_overrides
from mindrlhf.trainer.start import launch_from, list_unused


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    settings = "settings over --sft_config; train_yaml.group.key=value goes to the model YAML"
    add("overrides", nargs="*", metavar="group.key=value", help=settings)
    add("--sft_path_train", required=True, help="model YAML of the training graph")
    add_model_arguments(parser)
    dataset = "MindRecord with prompts and answers, or JSONL, JSON or parquet with messages (and tools)"
    add("--mind_dataset_dir", required=True, help=dataset)
    add("--sft_config", help="YAML of fine-tuning settings")
    add("--load_sft_checkpoint_train", help="weights to start from (default: random from the seed)")
    add("--save_ckpt_dir", type=Path, default=Path("out/sft/ckpt"), help="the model goes to its subfolder hf")
    add("--output_dir", type=Path, help="metrics and TensorBoard (default: the folder of --save_ckpt_dir)")


def run(args: argparse.Namespace) -> None:
    overrides = split_overrides(args.overrides, ("train_yaml",))
    yaml = load_model_yaml(args.sft_path_train, overrides["train_yaml"])
    config = load_sft_config(args.sft_config, overrides[""], yaml.adapter_defaults())
    checkpoint = args.load_sft_checkpoint_train
    model = yaml.architecture(checkpoint_config(checkpoint), checkpoint or "")
    check_sft(config, yaml, model, started_workers())
    model = with_adapters(model, config.lora, checkpoint)
    check_dropout(yaml, model.dropout)
    tokenizer = open_tokenizer(args, checkpoint)
    output = prepare_outputs(args.save_ckpt_dir, args.output_dir)
    with launch_from(yaml) as world:
        if world.rank == 0:
            list_unused(yaml)
        from mindrlhf.trainer.sft import fit

        with lock_outputs(world, output, args.save_ckpt_dir):
            fit(args, config, yaml, model, tokenizer, output, world)
