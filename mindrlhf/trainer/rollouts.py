"""Generation and scoring of responses, the input of a step."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
from mindspore import Parameter

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.tokenizer import stop_ids
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.metrics.progress import Advance
from mindrlhf.model_roles import GENERATOR
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.phases import CACHE
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rewards.samples import reward_samples
from mindrlhf.rewards.table import RewardTable
from mindrlhf.roles.generator import Generator
from mindrlhf.roles.part import ModelPart
from mindrlhf.roles.parts import Parts
from mindrlhf.rollout.engine import Engine
from mindrlhf.rollout.partner import Begun, EnvironmentRewards, Partner
from mindrlhf.rollout.unfinished import continued, requests_of
from mindrlhf.run.run import Run
from mindrlhf.shapes import round_responses, slot_count
from mindrlhf.types import Experience, Prompt, RolloutGroup, TokenValues, with_missing

Draw = Callable[[list[Prompt], int], list[Experience]]
"""Drawing of a round: prompts of all ranks and the step -> their experiences, on all ranks."""
Share = Callable[[Sequence[Experience]], list[Experience]]
"""Part of all ranks' experiences."""


class Rollouts:
    """Generator of scored responses to this rank's prompts.

    rows: of the dataset. rewards: None on ranks that do not score: another rank of their replica does. partner: of
    conversations. If the advantage needs it, the most probable response to each prompt is scored too.
    """

    def __init__(
        self,
        config: GRPOSettings,
        tokenizer: Tokenizer,
        rows: Sequence[Prompt],
        longest_prompt: int,
        generator: Generator,
        rewards: RewardRunner | None,
        run: Run,
        partner: Partner | None = None,
    ):
        self._settings = config.rollout
        self._seed = config.seed
        self._rewards = rewards
        self._run = run
        self._partner = partner
        self._decode = lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)
        ends = stop_ids(tokenizer, generator.partition.model)
        self._rows = {row.id: row for row in rows}
        self._begun: dict[int, Future[RewardTable]] = {}  # by the step that trains on the answers
        self._engine, self._greedy = open_engines(config, generator, longest_prompt, ends, tokenizer.decode)
        run.residency.add(CACHE, caches(self._engine, self._greedy), zeros=True)

    def __call__(self, prompts: list[Prompt], step: int) -> list[Experience]:
        """Generate and score a group for each prompt, on ranks that score."""
        return self.score(*self._generate(self._engine, prompts, self._settings.num_generations, step), step)

    def begin_scoring(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Begin to score whole groups, if functions can in the background.

        `whole` takes the same ones for this step.
        """
        alone = self._partner is None and self._greedy is None
        if alone and self._rewards and self._rewards.apart and step not in self._begun:
            samples = reward_samples(self._decode, groups, self._settings.max_new_tokens, ())
            self._begun[step] = self._rewards.begin(samples, step - 1)

    def score(self, groups: list[RolloutGroup], own: EnvironmentRewards, step: int) -> list[Experience]:
        """Score groups, on ranks that score.

        own: rewards of the environments, as in `reward_samples`.
        """
        greedy: list[RolloutGroup] = []
        more: EnvironmentRewards = ()
        if self._greedy:
            # A group's own prompt may lack its end, which an environment's first text has moved.
            prompts = [replace(self._rows[one.prompt.id], occurrence=one.prompt.occurrence) for one in groups]
            greedy, more = self._generate(self._greedy, prompts, 1, step)
        return self._score(groups, greedy, [*own, *more], step) if self._rewards else []

    def further(self, groups: Sequence[tuple[int, RolloutGroup, int]], step: int) -> list[RolloutGroup] | None:
        """Draw further tokens of unfinished answers.

        Returns None on ranks that do not score. groups: each with the step that trains on it, and the most further
        tokens of an answer. step: of the weights that draw.
        """
        settings = self._settings
        with self._generating() as progress:
            requests = requests_of(groups, settings, self._seed, self._partner)
            drawn = self._engine.answer(requests, progress)
        self._run.report.add_generation(self._engine.statistics)
        self._run.report.add_conversations(self._partner and self._partner.statistics)
        pairs = zip((group for _, group, _ in groups), drawn, strict=True)
        return [continued(*pair, settings.max_new_tokens, step) for pair in pairs] if self._rewards else None

    def whole(self, groups: list[RolloutGroup], step: int) -> list[Experience]:
        """Score groups that were drawn in parts."""
        self._add_turns(groups)
        own: EnvironmentRewards = ()
        if partner := self._partner:
            ended = [
                Begun(group.prompt, one, step, self._engine.ends_turn(one, partner))
                for group in groups
                for one in group.rollouts
            ]
            with self._run.timers("gen"):
                own = partner.recall(ended)
            groups = with_tokens(groups, partner.tokens)
            self._run.report.add_conversations(partner.statistics)
        if begun := self._begun.pop(step, None):
            with self._run.timers("reward"):
                table = begun.result()
            return self._experiences(groups, [], table, step)
        return self.score(groups, own, step)

    def _add_turns(self, groups: Sequence[RolloutGroup]) -> None:
        """Count the turns of whole conversations, on the rank of their partner."""
        if self._partner and self._partner.statistics:
            self._run.report.add_turns(groups)

    def _generate(
        self, engine: Engine, prompts: list[Prompt], samples: int, step: int
    ) -> tuple[list[RolloutGroup], EnvironmentRewards]:
        """Generate groups; returns them, and the partner's rewards if it has any."""
        with self._generating() as drawn:
            groups = engine.generate(prompts, samples, step, drawn, self._partner)
            own = self._partner.rewards() if self._partner else ()
            groups = with_tokens(groups, self._partner.tokens if self._partner else ())
        self._run.report.add_generation(engine.statistics)
        self._run.report.add_conversations(self._partner and self._partner.statistics)
        self._add_turns(groups)
        return groups, own

    @contextmanager
    def _generating(self) -> Iterator[Advance]:
        """Open the phase, with its progress for the engine."""
        run = self._run
        with run.timers("gen"), run.progress("generate", 0, "tokens") as advance:

            def drawn(tokens: int, total: int) -> None:
                advance(tokens, total)
                run.checkpointer.within_phase()  # may end the run by raising

            yield drawn

    def _score(
        self, groups: list[RolloutGroup], greedy: list[RolloutGroup], own: EnvironmentRewards, step: int
    ) -> list[Experience]:
        """Score samples; a failed call leaves its sample unscored, is counted, and shown once.

        own: rewards of the environments, as in `reward_samples`.
        """
        with self._run.timers("reward"):
            samples = reward_samples(self._decode, [*groups, *greedy], self._settings.max_new_tokens, own)
            table = self._rewards.score(samples, step - 1)
        return self._experiences(groups, greedy, table, step)

    def _experiences(
        self, groups: Sequence[RolloutGroup], greedy: Sequence[RolloutGroup], table: RewardTable, step: int
    ) -> list[Experience]:
        """Make the experiences of groups.

        table: of their samples, followed by those of `greedy`.
        """
        self._run.report.add_reward_table(table)
        ends = np.cumsum([len(group.rollouts) for group in groups])
        totals = np.split(table.totals, ends)
        by_function = {name: np.split(values, ends) for name, values in table.by_function.items()}
        notes = np.split(np.array(table.notes, object), ends)
        return [
            Experience(
                group,
                totals[i],
                {name: parts[i] for name, parts in by_function.items()},
                np.zeros(len(group.rollouts), np.float32),
                policy_step=step,
                notes=tuple(notes[i]) if any(notes[i]) else (),
                greedy_reward=float(totals[-1][i]) if greedy else None,
            )
            for i, group in enumerate(groups)
        ]


def open_engines(
    config: GRPOSettings,
    generator: Generator,
    longest_prompt: int,
    stop_ids: Sequence[int],
    decode_text: Callable[[Sequence[int]], str],
) -> tuple[Engine, Engine | None]:
    """Open a rank's engines of sampled responses, and of greedy ones if needed."""
    greedy = config.rollout.model_copy(update={"temperature": 0.0})
    # No engine has more slots than a round has responses.
    responses = round_responses(config, generator.data_parallel.size)
    first, second = (
        Engine(
            generator.partition.model,
            generator.rollout_decoder,
            sampling,
            slot_count(config.rollout.max_slots, count),
            longest_prompt,
            stop_ids,
            config.seed,
            config.train.length_bucket,
            decode_text,
            shows=config.rollout.tool_images,
            opening=generator.open_session,
        )
        if count
        else None
        for sampling, count in zip((config.rollout, greedy), responses, strict=True)
    )
    return first, second


def caches(*engines: Engine | None) -> list[Parameter]:
    """List the parameters of the engines' caches."""
    return [parameter for engine in engines if engine for parameter in engine.cache.parameters]


def counted_by(part: ModelPart | None) -> Share:
    """Select what a replica counts of all experiences, on its first rank."""
    if part is None or not part.partition.first_of_replica:
        return lambda experiences: []
    axis = part.data_parallel
    return lambda experiences: list(experiences[axis.rank :: axis.size])


@dataclass(frozen=True)
class DrawnTogether:
    """Drawing in which each rank that generates has its share of the prompts.

    parts: of this rank. data_parallel, collectives: among these ranks. between: called when a rank has generated.
    """

    rollouts: Rollouts
    parts: Parts
    run: Run
    data_parallel: DataParallel
    collectives: Collectives
    between: Callable[[], None] = lambda: None

    def __call__(self, prompts: list[Prompt], step: int) -> list[Experience]:
        return self._gathered(self.rollouts(self.data_parallel.share(prompts), step))

    def further(self, groups: Sequence[tuple[int, RolloutGroup, int]], step: int) -> list[RolloutGroup]:
        """Draw further tokens of unfinished answers, as `Rollouts.further`."""
        ranks = self.data_parallel.size
        own = self.rollouts.further(groups[self.data_parallel.rank :: ranks], step)
        self.between()
        parts = [iter(part) for part in self.collectives.all_gather_object(own) if part is not None]
        return [next(parts[place % ranks]) for place in range(len(groups))]

    def begin_scoring(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Begin to score groups that `scored` takes for the same step."""
        self.rollouts.begin_scoring(self.data_parallel.share(groups), step)

    def scored(self, groups: Sequence[RolloutGroup], step: int) -> list[Experience]:
        """Score a step's whole groups."""
        return self._gathered(self.rollouts.whole(self.data_parallel.share(groups), step))

    def token_scores(self, experiences: Sequence[Experience]) -> list[dict[str, tuple[np.ndarray, ...]]]:
        """Compute what models on these ranks know of tokens, by array.

        Returns the arrays of each experience.
        """
        own = self.parts.with_scores(self.data_parallel.share(experiences), self.run.timers)
        self.run.report.add_scored(counted_by(self.parts[GENERATOR.name])(experiences))
        return self.data_parallel.united([one.tokens for one in own])

    def _gathered(self, scored: list[Experience]) -> list[Experience]:
        self.between()
        return [one for part in self.collectives.all_gather_object(scored) for one in part]


class DrawnApart:
    """Drawing by some ranks, of which `tell` tells the others.

    draw: None on the other ranks, for which a round is the next one that they were told. root: a rank that draws.
    arrays: names of what models on the ranks that draw compute of tokens.
    """

    def __init__(self, draw: DrawnTogether | None, run: Run, root: int, arrays: Sequence[str] = ()):
        self._draw = draw
        self._arrays = arrays
        self._run = run
        self._root = root
        self._rounds: deque[list] = deque()
        self._awaited: list[Callable[[], None]] = []

    def __call__(self, prompts: list[Prompt], step: int) -> list[Experience]:
        return self._round(lambda draw: draw(prompts, step))

    def further(self, groups: Sequence[tuple[int, RolloutGroup, int]], step: int) -> list[RolloutGroup]:
        """Draw further tokens of unfinished answers, as `Rollouts.further`."""
        return self._round(lambda draw: draw.further(groups, step))

    def begin_scoring(self, groups: Sequence[RolloutGroup], step: int) -> None:
        """Begin to score groups that `scored` takes for the same step."""
        if self._draw:
            self._draw.begin_scoring(groups, step)

    def scored(self, groups: Sequence[RolloutGroup], step: int) -> list[Experience]:
        """Score a step's whole groups."""
        return self._round(lambda draw: draw.scored(groups, step))

    def lacks(self, experiences: Sequence[Experience]) -> bool:
        """Test for experiences without what is computed of tokens here."""
        return any(name not in one.tokens for name in self._arrays for one in experiences)

    def with_token_scores(self, experiences: list[Experience]) -> list[Experience]:
        """Add what is computed of tokens here, if missing."""
        if not self.lacks(experiences):
            return experiences
        computed = self._round(lambda draw: draw.token_scores(experiences))
        for name in self._arrays:
            experiences = with_missing(experiences, name, [arrays[name] for arrays in computed])
        return experiences

    def _round(self, drawn: Callable[[DrawnTogether], list]) -> list:
        """Make a round, or take the next one that was told."""
        if self._draw is None:
            return self._rounds.popleft()
        self._rounds.append(drawn(self._draw))
        return self._rounds[-1]

    def follow(self, work: Callable[[], None]) -> None:
        """Do work that draws rounds, on other ranks once they are told of them."""
        if self._draw is None:
            self._awaited.append(work)
        else:
            work()

    def settle(self) -> None:
        """Bring the rounds to all ranks, with the work that waits for them."""
        self.tell()
        awaited = self._awaited
        self._awaited = []
        for work in awaited:
            work()

    def tell(self) -> None:
        """Bring the rounds since the last call to all ranks; they wait first."""
        collectives = self._run.collectives
        with self._run.timers("wait"):
            collectives.barrier()
        told = collectives.broadcast_object(self._rounds, self._root)
        self._rounds = told if self._draw is None else deque()


def with_tokens(groups: list[RolloutGroup], values: Sequence[TokenValues]) -> list[RolloutGroup]:
    """Add a partner's values at tokens to rollouts, in order, if there are any."""
    if not any(values):
        return groups
    rows = iter(values)
    return [
        replace(group, rollouts=tuple(rollout.with_values(next(rows)) for rollout in group.rollouts))
        for group in groups
    ]
