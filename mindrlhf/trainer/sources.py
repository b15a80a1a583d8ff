"""Sources of the experiences that a run trains on.

The loop asks one source for the experiences of each step. Another schedule of generation is another class.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.stream import PromptStream
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.model_roles import GENERATOR
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.records.batches_ahead import Batch, BatchesAhead
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.parts import Parts
from mindrlhf.rollout.partner import Partner
from mindrlhf.run.checkpointer import Blob, Stateful
from mindrlhf.run.run import Run
from mindrlhf.run.training_data import Recorded, TrainingData
from mindrlhf.trainer.dynamic_sampling import StepSampling
from mindrlhf.trainer.rollouts import Rollouts
from mindrlhf.types import Experience, Prompt

Generate = Callable[[list[Prompt], int], list[Experience]]
"""Generator of scored responses to prompts of a step, as `Rollouts`."""


class Source(Protocol):
    """Source of experiences; every rank calls it at the same points.

    counters, blobs: its state for checkpoints, by name. position: number of rows drawn from the dataset.
    """

    counters: Mapping[str, Stateful]
    blobs: Mapping[str, Blob]
    position: int

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps."""

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Return a step's experiences of all ranks, and metrics by name.

        The updates of all earlier steps are done and published. `policy_step` of an experience is the step whose
        first update would start from the weights that drew it.
        """


@dataclass(frozen=True)
class FreshRollouts:
    """Rollouts drawn in the step that trains on them."""

    run: Run
    stream: PromptStream
    generate: Generate
    data_parallel: DataParallel
    sampling: StepSampling

    @property
    def counters(self) -> Mapping[str, Stateful]:
        return {"stream": self.stream}

    @property
    def blobs(self) -> Mapping[str, Blob]:
        return {"surplus": self.sampling}

    @property
    def position(self) -> int:
        return self.stream.position

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps until the run is over."""
        return self.run.steps()

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Generate and score, in several rounds with dynamic sampling."""
        sampling = self.sampling
        sampling.begin()
        while prompts := sampling.wanted():
            drawn = sampling.numbered(self.stream.next(prompts))
            scored = self.generate(self.data_parallel.share(drawn), step)
            self.run.checkpointer.between_phases()
            sampling.add(self.run.gather(scored))
        return sampling.take()


class DrawnBy:
    """Generator whose experiences name the step whose weights drew them.

    step: that step; `Rollouts` names the step that they are for.
    """

    def __init__(self, generate: Generate):
        self._generate = generate
        self.step = 0

    def __call__(self, prompts: list[Prompt], number: int) -> list[Experience]:
        return [replace(experience, policy_step=self.step) for experience in self._generate(prompts, number)]


class RolloutsAhead:
    """Rollouts drawn a number of steps before the step that trains on them.

    Each batch has the rows and random numbers of the step that trains on it, so that only the weights differ. Those of
    the first steps are all drawn in the first one. staleness: number of steps. fresh: draws a batch with `generate`.
    share: selects this training rank's part of all ranks' experiences.
    """

    def __init__(
        self, fresh: FreshRollouts, generate: DrawnBy, staleness: int, share: Callable[[Sequence], list] = list
    ):
        self._fresh = fresh
        self._generate = generate
        self._staleness = staleness
        self._share = share
        self._ahead = BatchesAhead()
        self.counters = {**fresh.counters, "ahead": self._ahead}
        self.blobs = {**fresh.blobs, "ahead": self._ahead}
        self.position = 0

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps; an early end leaves batches, and says so."""
        run = self._fresh.run
        yield from self._fresh.steps()
        if (left := self._ahead.steps) and run.collectives.is_first:
            print(f"what was drawn for {_of_steps(left)} is not trained on", flush=True)

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Draw ahead with the weights of now; return the step's batch."""
        run = self._fresh.run
        self._generate.step = step
        first = max(self._ahead.steps, default=step - 1) + 1
        for number in range(first, min(step + self._staleness, run.total_steps) + 1):
            experiences, figures = self._fresh.collect(number)
            self._ahead.put(number, Batch(experiences, figures, self._fresh.position))
            if number > step:
                run.report.add_drawn(self._share(experiences))
        batch = self._ahead.take(step)
        self.position = batch.position
        return batch.experiences, {**batch.figures, **ages(batch.experiences, step)}


def _of_steps(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def ages(experiences: Sequence[Experience], step: int) -> dict[str, float]:
    """Measure by how many steps the weights that drew groups are older."""
    found = [step - experience.policy_step for experience in experiences] or [0]
    return {"sample/staleness_mean": sum(found) / len(found), "sample/staleness_max": float(max(found))}


@dataclass(frozen=True)
class RecordedRollouts:
    """Rollouts of an earlier run, read from its record.

    measures: add their `ages` to the metrics.
    """

    run: Run
    recorded: Recorded
    measures: bool = False
    counters: Mapping[str, Stateful] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    position: int = 0

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the recorded steps that are left."""
        return (step for step, _ in self.recorded[self.run.first_step - 1 :])

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Return the experiences recorded for a step."""
        experiences = dict(self.recorded)[step]
        return experiences, ages(experiences, step) if self.measures else {}


def said_of_staleness(config: GRPOSettings) -> str:
    """Say in one sentence how old answers are, and what corrects for it."""
    steps = config.trainer.staleness
    correction = config.rollout_correction
    old = f"trainer.staleness {steps}: answers are drawn with weights of {steps} step{'s' * (steps > 1)} before"
    if correction.level is None:
        return f"{old}, and rollout_correction.level null does not correct for it"
    weights = f"{correction.level} importance weights, mode {correction.mode}, up to {correction.upper:g}"
    return f"{old}; rollout_correction corrects for it by {weights}"


def open_source(
    config: GRPOSettings,
    tokenizer: Tokenizer,
    data: TrainingData,
    run: Run,
    parts: Parts,
    rewards: RewardRunner | None,
    partner: Partner | None,
) -> Source:
    """Open the source of a run.

    These are rollouts of the generator among its parts, or recorded ones without one. rewards: None on ranks that do
    not score. partner: of conversations.
    """
    generator = parts.get(GENERATOR.name)
    staleness = config.trainer.staleness
    if staleness and run.collectives.is_first:
        print(said_of_staleness(config), flush=True)
    if generator is None:
        return RecordedRollouts(run, data.recorded, measures=staleness > 0)
    generate = Rollouts(config, tokenizer, data.longest_prompt, generator, rewards, run, partner)
    drawn_by = DrawnBy(generate)
    # A run that goes on with a smaller staleness trains on what was drawn before.
    if not staleness and not (run.checkpoint and run.checkpoint.counters.get("ahead")):
        return FreshRollouts(run, data.stream, generate, generator.data_parallel, StepSampling(config))
    fresh = FreshRollouts(run, data.stream, drawn_by, generator.data_parallel, StepSampling(config))
    return RolloutsAhead(fresh, drawn_by, staleness, parts.policy.data_parallel.share)
