"""Fine-tuning loop: each step is one update on demonstrated answers, by GRPO's machinery.

A demonstration is a group of one response, and the loss is the mean of -log p over all tokens that its author wrote.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.evaluation.held_out_loss import HeldOutLoss
from mindrlhf.evaluation.validation import open_validation
from mindrlhf.job import Job
from mindrlhf.metrics.timer import STEP
from mindrlhf.model_roles import POLICY
from mindrlhf.models.adapters import trained_lines
from mindrlhf.roles.fine_tuned import FineTuned
from mindrlhf.roles.part import ModelPart, Opening
from mindrlhf.roles.parts import Parts
from mindrlhf.run.compile_cache import use_compile_cache
from mindrlhf.run.report import StepRecord, TuningReport, TuningResult
from mindrlhf.run.run import Run, Validation, continued_checkpoint
from mindrlhf.run.stop_signals import StopSignals
from mindrlhf.run.tuning_data import TuningData, read_tuning_data
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.optimizer import learning_rate


@dataclass(frozen=True)
class SFTLoop:
    """Order of a step's phases. validation: None without held-out data."""

    config: SFTSettings
    data: TuningData
    parts: Parts
    run: Run
    validation: Validation | None = None

    def steps(self) -> Iterator[StepRecord]:
        """Train until the run is over; yields each step."""
        run = self.run
        stream = self.data.stream
        yield from run.validate_first(self.validation)
        for step in run.steps():
            with run.timers(STEP):
                result = self.train(stream.next(), step)
                run.validate(self.validation, step)
            yield run.record(step, result, stream.position)
        run.checkpointer.finish()

    def train(self, pairs: Sequence[SequenceGroup], step: int) -> TuningResult:
        """Make one update from this rank's share of a step's demonstrations."""
        policy = self.parts.policy
        own = policy.data_parallel.share(pairs)
        rate = learning_rate(self.config.optimizer, step - 1, self.run.total_steps)
        tokens = sum(int(mask.sum()) for pair in own for mask in pair.sampled)
        with self.run.timers("update_actor"), self.run.progress("update", tokens, "tokens") as advance:
            return TuningResult(own, [policy.update(own, rate, advance)])


def build(job: Job, world: World, stack: ExitStack, signals: StopSignals) -> SFTLoop:
    """Build the loop of a job that `signals` may stop; `stack` closes everything."""
    data = read_tuning_data(job)
    collectives = Collectives(world)
    checkpoint = continued_checkpoint(job, data, collectives)
    if job.flags.enable_compile_cache:
        use_compile_cache(job.described(), job.config.kind, world, stack)
    for title, text in trained_lines(job.model, job.config).items() if world.rank == 0 else ():
        print(f"{title}: {text}", flush=True)
    run = Run(job, data, collectives, checkpoint, signals, TuningReport)
    known = run.report.known_rows
    opening = Opening(job.config, job.yamls, job.roles, collectives, data.max_positions, checkpoint, known_rows=known)
    policy = FineTuned(opening)
    measures: list[Validation] = []
    if data.held_out:
        measures.append(HeldOutLoss(policy.scorer, data.held_out, policy.data_parallel, run.progress))
    if data.problems:
        generator = ModelPart(job.infer, job.model, collectives, data.max_positions, known_rows=known)
        policy.publish_to(generator)
        accuracy = open_validation(job.config, job.objects, job.tokenizer, job.output, generator, data.problems, stack)
        accuracy.register(run.residency)
        measures.append(accuracy)
    parts = Parts({POLICY.name: policy})
    run.begin(parts, {"stream": data.stream}, {}, stack)
    return SFTLoop(job.config, data, parts, run, together(measures) if measures else None)


def together(measures: Sequence[Validation]) -> Callable[[int], Mapping[str, float]]:
    """Join measurements on held-out data."""
    return lambda step: {name: value for measure in measures for name, value in measure(step).items()}
