"""Sources of the experiences that a run trains on.

The loop asks one source for the experiences of each step. Another schedule of generation is another class.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.placement import said_of_placement
from mindrlhf.configs.staleness import said_of_staleness, scores_later
from mindrlhf.data.stream import PromptStream
from mindrlhf.files.text import numbered
from mindrlhf.job import Job
from mindrlhf.metrics.ages import ages
from mindrlhf.model_roles import GENERATOR, arrays_beside
from mindrlhf.records.batches_ahead import Batch, BatchesAhead, in_parts
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.roles.parts import Parts
from mindrlhf.rollout.partner import Partner
from mindrlhf.rollout.unfinished import InParts, count_tokens
from mindrlhf.run.checkpointer import Blob, Stateful
from mindrlhf.run.run import Run
from mindrlhf.run.training_data import Recorded, TrainingData
from mindrlhf.trainer.dynamic_sampling import StepSampling
from mindrlhf.trainer.rollouts import Draw, DrawnApart, DrawnTogether, Rollouts, Share, counted_by
from mindrlhf.types import Experience, Prompt


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

    def settle(self) -> Mapping[str, float]:
        """Take in what was drawn during a step's updates; returns metrics of it.

        The weights may change then.
        """


@dataclass(frozen=True)
class FreshRollouts:
    """Rollouts drawn in the step that trains on them.

    share: see `RolloutsAhead`. scores: adds to a step's experiences what ranks that draw compute of tokens.
    """

    run: Run
    stream: PromptStream
    draw: Draw
    sampling: StepSampling
    share: Share = list
    scores: Share = list

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
        self.sampling.begin()
        drawn = self.fill(step)
        experiences, figures = self.sampling.take()
        used = {id(one) for one in experiences}
        self.run.report.add_drawn(self.share([one for one in drawn if id(one) not in used]))
        return self.scores(experiences), figures

    def fill(self, step: int) -> list[Experience]:
        """Draw rounds until the step wants no more; returns their experiences."""
        drawn: list[Experience] = []
        while prompts := self.sampling.wanted():
            more = self.draw(self.sampling.numbered(self.stream.next(prompts)), step)
            self.sampling.add(more)
            drawn += more
        return drawn

    def settle(self) -> Mapping[str, float]:
        """Return no metrics: no rank draws during updates."""
        return {}


class DrawnBy:
    """Drawing whose experiences name the step whose weights drew them.

    step: that step; None if it is the step that they are for, as `Rollouts` says.
    """

    def __init__(self, draw: Draw):
        self._draw = draw
        self.step: int | None = None

    def __call__(self, prompts: list[Prompt], number: int) -> list[Experience]:
        experiences = self._draw(prompts, number)
        return experiences if self.step is None else [replace(one, policy_step=self.step) for one in experiences]


class RolloutsAhead:
    """Rollouts drawn a number of steps before the step that trains on them.

    Each batch has the rows and random numbers of the step that trains on it, so that only the weights differ. Those of
    the first steps are all drawn in the first one. staleness: number of steps. fresh: draws a batch by `drawn_by`.
    share: selects the part of all ranks' experiences whose generation this rank counts. apart: it trains on nothing
    whose generation it counts.
    """

    apart = False

    def __init__(self, fresh: FreshRollouts, drawn_by: DrawnBy, staleness: int, share: Share = list):
        self._fresh = fresh
        self._drawn_by = drawn_by
        self._staleness = staleness
        self._share = share
        self._ahead = BatchesAhead(fresh.stream.pictured)
        self.counters = {**fresh.counters, "ahead": self._ahead}
        self.blobs = {**fresh.blobs, "ahead": self._ahead}
        self.position = 0

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the steps; an early end leaves batches, and says so."""
        run = self._fresh.run
        yield from self._fresh.steps()
        if (left := self._ahead.steps) and run.collectives.is_first:
            print(f"what was drawn for {numbered('step', left)} is not trained on", flush=True)

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Draw ahead with the weights of now; return the step's batch."""
        self._draw(self._due(step), step)
        return self._taken(step)

    def settle(self) -> Mapping[str, float]:
        """Return no metrics: no rank draws during updates."""
        return {}

    def _due(self, step: int) -> Sequence[int]:
        """List the steps whose batches the weights of now draw."""
        first = max(self._ahead.steps, default=step - 1) + 1
        return range(first, min(step + self._staleness, self._fresh.run.total_steps) + 1)

    def _draw(self, numbers: Sequence[int], step: int) -> None:
        """Draw the batches of steps with the weights that `step` begins with."""
        self._drawn_by.step = step
        for number in numbers:
            experiences, figures = self._fresh.collect(number)
            self._ahead.put(number, Batch(experiences, figures, self._fresh.position))
            if self.apart or number > step:
                self._fresh.run.report.add_drawn(self._share(experiences))

    def _score_tokens(self, step: int) -> None:
        """Add a batch's scores of tokens, by ranks that draw."""
        batch = self._ahead[step]
        self._ahead.put(step, replace(batch, experiences=self._fresh.scores(batch.experiences)))

    def _taken(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        batch = self._ahead.take(step)
        self.position = batch.position
        return batch.experiences, {**batch.figures, **ages(batch.experiences, step)}


class RolloutsInParts(RolloutsAhead):
    """Rollouts drawn in parts, a number of tokens a step.

    See `InParts`: of the step's own batch all is drawn that is missing. Later batches that are whole are scored in the
    background. drawn: draws the parts and scores whole groups.
    """

    def __init__(
        self,
        fresh: FreshRollouts,
        drawn_by: DrawnBy,
        staleness: int,
        share: Share,
        drawn: DrawnTogether | DrawnApart,
        config: GRPOSettings,
    ):
        super().__init__(fresh, drawn_by, staleness, share)
        self._config = config
        self._drawn = drawn
        self._parts = InParts(self._ahead, drawn.further, config.rollout, config.seed)
        self._tokens = 0  # drawn in the step

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Draw the step's tokens; return its batch, scored."""
        self._draw_parts(self._limits(step), step)
        self._score(step)
        return self._taken(step)

    def settle(self) -> Mapping[str, float]:
        """Return the numbers of drawn tokens and of answers that go on."""
        figures = {"sample/drawn_tokens": self._tokens, "sample/unfinished": self._parts.count(self._ahead.steps)}
        self._tokens = 0
        return figures

    def _limits(self, step: int) -> dict[int, int]:
        """Begin the batches that are due; return tokens of an answer by batch."""
        due = self._due(step)
        later = [number for number in due if number > step]
        self._begin([number for number in due if number == step], step)
        answers = self._config.data.prompts_per_step * self._config.rollout.num_generations  # of a batch
        share = self._parts.share(len(later) * answers)
        if share:
            self._begin(later, step)
        limits = dict.fromkeys(self._ahead.steps if share else [], share)
        return {**limits, step: self._config.rollout.max_new_tokens}

    def _draw_parts(self, limits: Mapping[int, int], step: int) -> None:
        """Draw and count tokens; begin to score later batches that are whole."""
        self._tokens += self._parts.draw(limits, step)
        for number in [number for number in limits if number > step and self._parts.ended(number)]:
            self._drawn.begin_scoring([one.group for one in self._ahead[number].experiences], number)
            self._score_tokens(number)

    def _begin(self, numbers: Sequence[int], step: int) -> None:
        """Take the prompts of batches whose first tokens the weights of `step` draw."""
        for number in numbers:
            prompts = StepSampling(self._config).numbered(self._fresh.stream.next())
            self._parts.begin(number, prompts, step, self._fresh.position)

    def _score(self, step: int) -> None:
        """Score the step's batch, unless a run without parts has drawn it.

        Groups that dynamic sampling wants in place of some are drawn whole, with the weights of the step.
        """
        batch = self._ahead[step]
        if batch.whole:
            self._score_tokens(step)
            return
        sampling = self._fresh.sampling
        scored = self._drawn.scored([one.group for one in batch.experiences], step)
        sampling.begin()
        sampling.numbered([one.group.prompt for one in batch.experiences])
        pairs = zip(scored, batch.experiences, strict=True)
        sampling.add([replace(one, policy_step=e.policy_step, tokens=e.tokens) for one, e in pairs])
        self._tokens += count_tokens([one.group for one in self._fresh.fill(step)])
        experiences, figures = sampling.take()
        self._ahead.put(step, Batch(self._fresh.scores(experiences), figures, batch.position))
        own = self._share(experiences)
        self._fresh.run.report.add_drawn([e for e in own if self.apart or e.policy_step < step])


class SplitRollouts(RolloutsAhead):
    """Rollouts drawn by some ranks while others train.

    The batch that a step trains on is drawn first if it is not there; later ones are drawn during the updates, until
    `settle`. Ranks that train collect them then from the rounds that they are told: all have the same ones.
    """

    apart = True

    def __init__(self, fresh: FreshRollouts, drawn_by: DrawnBy, staleness: int, share: Share, rounds: DrawnApart):
        super().__init__(fresh, drawn_by, staleness, share)
        self._rounds = rounds

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Return the step's batch; ranks that generate draw ahead meanwhile."""
        due = self._due(step)
        if step in due:
            self._draw([step], step)
            self.settle()
            self._fresh.run.checkpointer.between_phases()
        if self._rounds.lacks(self._ahead[step].experiences):
            self._rounds.follow(partial(self._score_tokens, step))
            self.settle()
        self._draw([number for number in due if number > step], step)
        return self._taken(step)

    def settle(self) -> Mapping[str, float]:
        """Bring what was drawn to all ranks."""
        self._rounds.settle()
        return {}

    def _draw(self, numbers: Sequence[int], step: int) -> None:
        """Draw batches, or wait for them until ranks settle."""
        self._rounds.follow(partial(super()._draw, numbers, step))


class SplitInParts(RolloutsInParts):
    """Rollouts drawn in parts by some ranks while others train.

    The step's own batch is drawn to its end first, and the others' share of the quota during the updates, until
    `settle`: the tokens and weights of ranks that do both.
    """

    apart = True
    _drawn: DrawnApart

    def collect(self, step: int) -> tuple[list[Experience], Mapping[str, float]]:
        """Return the step's batch, scored; ranks that generate draw the others' tokens meanwhile."""
        later = self._limits(step)
        own = {step: later.pop(step)}
        self._drawn.follow(partial(self._draw_parts, own, step))
        self._drawn.follow(partial(self._score, step))
        self._drawn.settle()
        self._fresh.run.checkpointer.between_phases()
        taken = self._taken(step)
        self._drawn.follow(partial(self._draw_parts, later, step))
        return taken

    def settle(self) -> Mapping[str, float]:
        """Bring the drawn tokens to all ranks; return their number."""
        self._drawn.settle()
        return super().settle()


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

    def settle(self) -> Mapping[str, float]:
        """Return no metrics: a record is complete."""
        return {}


def open_source(
    job: Job, data: TrainingData, run: Run, parts: Parts, rewards: RewardRunner | None, partner: Partner | None
) -> Source:
    """Open the source of a run: its generator's rollouts, or recorded ones.

    rewards: None on ranks that do not score. partner: of conversations.
    """
    config = job.config
    staleness = config.trainer.staleness
    if staleness and run.collectives.is_first:
        print(said_of_staleness(config), flush=True)
    if job.splits and run.collectives.is_first:
        print(said_of_placement(job.yamls, staleness), flush=True)
    if data.recorded:
        return RecordedRollouts(run, data.recorded, measures=staleness > 0)
    generator = parts.get(GENERATOR.name)
    draw: DrawnTogether | None = None
    if generator:
        rows = data.stream.prompts
        generate = Rollouts(config, job.tokenizer, rows, data.longest_prompt, generator, rewards, run, partner)
        between = (lambda: None) if job.splits else run.checkpointer.between_phases
        draw = DrawnTogether(generate, parts, run, generator.data_parallel, generator.collectives, between)
    rounds = DrawnApart(draw, run, job.infer.ranks[0], arrays_beside(job.roles, job.yamls)) if job.splits else None
    drawn_by = DrawnBy(rounds or draw)
    counted = counted_by(generator if rounds else parts.policy)
    sampling = StepSampling(config, data.stream.pictured)
    fresh = FreshRollouts(run, data.stream, drawn_by, sampling, counted, rounds.with_token_scores if rounds else list)
    ahead = (run.checkpoint and run.checkpoint.counters.get("ahead")) or {}
    parts_go_on = config.rollout.tokens_per_step or in_parts(ahead)
    if rounds and (parts_go_on or scores_later(config, job.objects.functions)):
        return SplitInParts(fresh, drawn_by, staleness, counted, rounds, config)
    if rounds:
        return SplitRollouts(fresh, drawn_by, staleness, counted, rounds)
    # A run that goes on with a smaller staleness trains on what was drawn before.
    if draw and parts_go_on:
        return RolloutsInParts(fresh, drawn_by, staleness, counted, draw, config)
    if not staleness and not ahead:
        return fresh
    return RolloutsAhead(fresh, drawn_by, staleness, counted)
