"""Start of a training job, from its processes to the trained model."""

from collections.abc import Callable, Generator
from contextlib import ExitStack
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias

from mindrlhf.backend.process.launch import World, is_first_process, launch
from mindrlhf.checkpoint.local import local_models
from mindrlhf.checkpoint.weights import checkpoint_config
from mindrlhf.configs.model_yaml import ELSEWHERE, ModelYaml
from mindrlhf.flags import SFTFlags, TrainFlags
from mindrlhf.job import Job
from mindrlhf.parallel.layout import yaml_layout
from mindrlhf.reshard.strategy import save_strategies
from mindrlhf.run.outputs import lock_outputs
from mindrlhf.run.stop_signals import Stopped, StopSignals
from mindrlhf.trainer.check import check, check_tuning, read_settings

if TYPE_CHECKING:  # it imports MindSpore; errors in settings are reported before that
    from mindrlhf.run.report import StepRecord

Build = Callable[[Job, World, ExitStack, StopSignals], Any]
"""Builder of a loop, which has `steps`, `run`, `parts` and `validation`; the stack closes everything."""
Steps: TypeAlias = Generator["StepRecord", None, bool]
"""Steps of a job, once recorded. Returns True if the trained model is written: not after a stop or with `val_only`.

The caller may use the job's signals to stop; closing the generator stops at once. The state is saved then.
"""


def save_both_strategies(flags: TrainFlags) -> None:
    """Write MindSpore's strategy files of both layouts, for `--only_save_strategy True`."""
    if not is_first_process():
        return
    flags, _, yamls = read_settings(flags)
    flags = local_models(flags, weights=False)
    hf = checkpoint_config(flags.load_sft_checkpoint_train or flags.load_sft_checkpoint_infer, seeing=True)
    output = flags.output_dir or flags.save_ckpt_dir.parent
    for role, yaml in yamls.items():
        layout = yaml_layout(yaml, yaml.architecture(hf))
        folder = output / "strategy" / role
        save_strategies(folder, layout)
        print(f"{folder}: strategy files of {layout.size} ranks", flush=True)


def list_unused(yaml: ModelYaml, generating: bool = False) -> None:
    """Print the keys of a model YAML that have no effect here, by group."""
    groups: dict[str, list[str]] = {}
    for key in (*yaml.unused, *yaml.without_effect(generating)):
        group, _, name = key.rpartition(".")
        title = group or (f"set by {ELSEWHERE[key]}" if key in ELSEWHERE else "MindFormers' trainer")
        groups.setdefault(title, []).append(name)
    lines = [f"{title}: {', '.join(names)}" for title, names in groups.items()]
    if lines:
        print("\n".join([f"{yaml.path}: not used here:", *map(_indented, lines)]), flush=True)


def _indented(line: str) -> str:
    return fill(
        line, 100, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def launch_from(job: Job) -> World:
    """Start this process with a job's device and number of workers."""
    yaml = job.train
    return launch(
        yaml.context.device_target,
        worker_count=job.workers,
        layout_source=f"{yaml.path}: parallel_config",
        context=yaml.context,
        rank_timeout_s=job.config.trainer.rank_timeout_s,
    )


def run_grpo(flags: TrainFlags, signals: StopSignals) -> None:
    """Generate and train, or train on recorded rollouts; write the trained model."""
    if flags.only_save_strategy:
        save_both_strategies(flags)
        return
    for _ in grpo_steps(check(flags), signals):
        pass


def grpo_steps(job: Job, signals: StopSignals) -> Steps:
    """Run a job as `run_grpo`, step by step."""
    with launch_from(job) as world:
        if world.rank == 0:
            list_unused(job.train)
            if job.infer.path != job.train.path:
                list_unused(job.infer, generating=True)
        # It imports MindSpore, which has to wait until `launch` has set the environment that MindSpore reads.
        from mindrlhf.trainer.build import build

        return (yield from loop_steps(build, job, world, signals))


def run_sft(flags: SFTFlags, signals: StopSignals) -> None:
    """Train on demonstrations; write the fine-tuned model."""
    for _ in sft_steps(check_tuning(flags), signals):
        pass


def sft_steps(job: Job, signals: StopSignals) -> Steps:
    """Run a job as `run_sft`, step by step."""
    with launch_from(job) as world:
        if world.rank == 0:
            list_unused(job.train)
        from mindrlhf.trainer.sft import build

        return (yield from loop_steps(build, job, world, signals))


def loop_steps(build: Build, job: Job, world: World, signals: StopSignals) -> Steps:
    """Build a job's loop, yield its steps, and write the trained model."""
    with ExitStack() as stack:
        stack.enter_context(lock_outputs(world, job.output, job.flags.save_ckpt_dir, job.flags.save_data_file))
        loop = build(job, world, stack, signals)
        try:
            loop.run.checkpointer.between_phases()
            if job.config.trainer.val_only:
                yield loop.run.validate_only(loop.validation)
                return False
            for record in loop.steps():
                yield record
                loop.run.checkpointer.between_phases()
            loop.run.export(loop.parts)
            return True
        except (Stopped, GeneratorExit) as stopped:
            reason = str(stopped) or f"stopped: {loop.run.checkpointer.leave()}"
            if world.rank == 0:
                print(reason, flush=True)
            return False
