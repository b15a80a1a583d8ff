"""Start of a `mindrlhf train` job, from its processes to the trained model."""

import argparse
from contextlib import ExitStack

from mindrlhf.backend.process.launch import World, is_first_process, launch
from mindrlhf.checkpoint.open import checkpoint_config
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml
from mindrlhf.parallel.layout import yaml_layout
from mindrlhf.reshard.strategy import save_strategies
from mindrlhf.run.outputs import lock_outputs
from mindrlhf.run.stop_signals import Stopped, StopSignals
from mindrlhf.trainer.check import check, split_overrides


def save_both_strategies(args: argparse.Namespace) -> None:
    """Write MindSpore's strategy files of both layouts, for `--only_save_strategy True`."""
    if not is_first_process():
        return
    overrides = split_overrides(args.overrides)
    hf = checkpoint_config(args.load_sft_checkpoint_train or args.load_sft_checkpoint_infer)
    output = args.output_dir or args.save_ckpt_dir.parent
    for role, path in (("train", args.sft_path_train), ("infer", args.sft_path_infer)):
        yaml = load_model_yaml(path, overrides[f"{role}_yaml"])
        layout = yaml_layout(yaml, yaml.architecture(hf))
        folder = output / "strategy" / role
        save_strategies(folder, layout)
        print(f"{folder}: strategy files of {layout.size} ranks", flush=True)


def list_unused(yaml: ModelYaml, generating: bool = False) -> None:
    """Print the keys of a model YAML that have no effect here."""
    unused = [*yaml.unused, *yaml.without_effect(generating)]
    if unused:
        print(f"{yaml.path}: not used here: {', '.join(unused)}", flush=True)


def launch_from(yaml: ModelYaml) -> World:
    """Start this process as a model YAML says: device, and number of workers."""
    source, context = f"{yaml.path}: parallel_config", yaml.context
    return launch(context.device_target, worker_count=yaml.parallel.workers, layout_source=source, context=context)


def run_grpo(args: argparse.Namespace, signals: StopSignals) -> None:
    """Generate and train, or train on recorded rollouts; write the trained model."""
    if args.only_save_strategy:
        save_both_strategies(args)
        return
    job = check(args)
    with launch_from(job.train) as world:
        if world.rank == 0:
            list_unused(job.train)
            list_unused(job.infer, generating=True)
        # It imports MindSpore, which must not happen before `launch` has set what MindSpore reads when it starts.
        from mindrlhf.trainer.build import build

        with ExitStack() as stack:
            stack.enter_context(lock_outputs(world, job.output, job.args.save_ckpt_dir, job.args.save_data_file))
            trainer = build(job, world, stack, signals)
            try:
                trainer.run.checkpointer.between_phases()
                if job.config.trainer.val_only:
                    trainer.validate_only()
                    return
                if trainer.data.recorded:
                    trainer.replay()
                else:
                    trainer.fit()
                trainer.run.export(trainer.parts)
            except Stopped as stopped:
                if world.rank == 0:
                    print(stopped, flush=True)
