"""Start of a `mindrlhf train` job, from its processes to the trained model."""

import argparse
from contextlib import ExitStack

from mindrlhf.backend.process.launch import AscendOptions, is_first_process, launch
from mindrlhf.checkpoint.open import checkpoint_config
from mindrlhf.configs.model_yaml import ModelYaml, load_model_yaml
from mindrlhf.parallel.layout import yaml_layout
from mindrlhf.reshard.strategy import save_strategies
from mindrlhf.run.outputs import lock_outputs
from mindrlhf.run.stop import Stopped
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.trainer.check import check, split_overrides


def save_both_strategies(args: argparse.Namespace) -> None:
    """Write MindSpore's strategy files of both layouts, and nothing else.

    It serves `--only_save_strategy True`, with files in the output folder.
    It computes the layouts from the YAMLs and starts nothing, so one process does it for any number of ranks.
    """
    if not is_first_process():
        return
    overrides = split_overrides(args.overrides)
    hf = checkpoint_config(args.load_sft_checkpoint_train or args.load_sft_checkpoint_infer)
    output = args.output_dir or args.save_ckpt_dir.parent
    for role, path in (("train", args.sft_path_train), ("infer", args.sft_path_infer)):
        yaml = load_model_yaml(path, overrides[f"{role}_yaml"])
        layout = yaml_layout(yaml, yaml.architecture(hf))
        save_strategies(output / "strategy" / role, layout)
        print(f"{output / 'strategy' / role}: strategy files of {layout.size} ranks", flush=True)


def list_unused(yaml: ModelYaml, generating: bool = False) -> None:
    """Log once the keys of a model YAML without effect.

    They are those of MindFormers' own trainer, and those set for another device or, in the YAML that generates, for
    training.
    """
    unused = [*yaml.unused, *yaml.without_effect(generating)]
    if unused:
        print(f"{yaml.path}: not used here: {', '.join(unused)}", flush=True)


def ascend_options(yaml: ModelYaml) -> AscendOptions:
    """Read the device's options of a model YAML."""
    context = yaml.context
    return AscendOptions(context.device_id, context.max_device_memory, context.jit_level)


def run_grpo(args: argparse.Namespace, signals: StopSignals) -> None:
    """Generate and train, or train on recorded rollouts; write the trained model.

    signals: may ask the run to stop.
    """
    if args.only_save_strategy:
        save_both_strategies(args)
        return
    job = check(args)
    with launch(
        job.train.context.device_target,
        worker_count=job.train.parallel.workers,
        layout_source=f"{job.train.path}: parallel_config",
        ascend=ascend_options(job.train),
    ) as world:
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
            except Stopped as stopped:
                if world.rank == 0:
                    print(stopped, flush=True)
                return
            trainer.run.export(trainer.parts)
