"""Sources of the experiences that a run trains on.

The loop asks one source for the experiences of each step. Another schedule of generation is another class.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.stream import PromptStream
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.model_roles import GENERATOR
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.parts import Parts
from mindrlhf.rollout.partner import Partner
from mindrlhf.run.checkpointer import Blob, Stateful
from mindrlhf.run.run import Run
from mindrlhf.run.training_data import Recorded, TrainingData
from mindrlhf.trainer.dynamic_sampling import StepSampling
from mindrlhf.trainer.rollouts import Rollouts
from mindrlhf.types import Experience


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
    generate: Rollouts
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


@dataclass(frozen=True)
class RecordedRollouts:
    """Rollouts of an earlier run, read from its record."""

    run: Run
    recorded: Recorded
    counters: Mapping[str, Stateful] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    position: int = 0

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the recorded steps that are left."""
        return (step for step, _ in self.recorded[self.run.first_step - 1 :])

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Return the experiences recorded for a step."""
        return dict(self.recorded)[step], {}


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
    if generator is None:
        return RecordedRollouts(run, data.recorded)
    generate = Rollouts(config, tokenizer, data.longest_prompt, generator, rewards, run, partner)
    return FreshRollouts(run, data.stream, generate, generator.data_parallel, StepSampling(config))
