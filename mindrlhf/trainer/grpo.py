"""The GRPO loop. One step reads top to bottom like the algorithm (Shao et al. 2024, algorithm 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.algorithms.advantages import RewardBatch, compute_advantages
from mindrlhf.algorithms.aggregation import batch_totals, token_weights
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.data.stream import PromptStream
from mindrlhf.metrics.progress import Progress
from mindrlhf.metrics.timer import STEP, Timers
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.reshard.online import ReshardStatistics
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rollout.engine import Engine
from mindrlhf.trainer.report import StepReport
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.schedule import learning_rate
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Update, Updater
from mindrlhf.types import Experience, Prompt, RolloutGroup


@dataclass
class GRPOTrainer:
    """Everything a step needs, built by `trainer.build`; this class only says in which order it happens.

    aggregation: a name of `algorithms.aggregation.MODES`. decode: token ids -> text without special tokens.
    generating, training: which share of a step's prompts this rank answers, and of its experiences it trains on; the
    ranks that share a replica have the same. gather: the experiences of all ranks, in order, from each one's own.
    rewards: None on ranks that leave scoring to another one of their replica.
    reference: None when beta is 0. old: None when every batch is used for one update (the update takes its own value).
    publish: brings the updated weights to the graphs that generate; None where they are the same. total_steps: length
    of the run, for the schedule.
    """

    config: GRPOConfig
    aggregation: str
    stream: PromptStream | None
    engine: Engine | None
    rewards: RewardRunner | None
    decode: Callable[[Sequence[int]], str]
    reference: Scorer | None
    old: Scorer | None
    updater: Updater
    publish: Callable[[], ReshardStatistics] | None
    generating: DataParallel
    training: DataParallel
    gather: Callable[[list[Experience]], list[Experience]]
    report: StepReport
    timers: Timers
    progress: Progress
    total_steps: int

    def fit(self) -> None:
        """Generates and trains for `total_steps` steps."""
        for step in range(1, self.total_steps + 1):
            with self.timers(STEP):
                groups = self.generate(self.generating.share(self.stream.next()), step)
                experiences = self.gather(self.score(groups))
                updates, experiences = self.train(experiences, step)
                self.reshard()
            self.report.write(step, experiences, updates, self.engine.statistics, self.stream.position)

    def replay(self, steps: Sequence[tuple[int, list[Experience]]]) -> None:
        """Trains on recorded rollouts (`rollout_record`), as the run that made them did."""
        for step, experiences in steps:
            with self.timers(STEP):
                updates, experiences = self.train(experiences, step)
            self.report.write(step, experiences, updates)

    def train(self, experiences: list[Experience], step: int) -> tuple[list[Update], list[Experience]]:
        """Advantages of all experiences; reference and old log-probs and updates of this rank's share, which is
        returned.
        """
        experiences = self.training.share(self.with_advantages(experiences))
        experiences = self.with_log_probs(experiences)
        return self.update(experiences, step), experiences

    def generate(self, prompts: list[Prompt], step: int) -> list[RolloutGroup]:
        count = len(prompts) * self.config.rollout.num_generations
        with self.timers("gen"), self.progress("generate", count, "responses") as advance:
            groups = self.engine.generate(prompts, self.config.rollout.num_generations, step, advance)
            self.timers.compile(self.engine.statistics.compile_s)
        return groups

    def score(self, groups: list[RolloutGroup]) -> list[Experience]:
        """Rewards of all responses; a function that fails costs its sample, is counted, and is shown once."""
        if self.rewards is None:
            return []
        with self.timers("reward"):
            limit = str(self.config.rollout.max_new_tokens)
            table = self.rewards.score(
                [
                    (
                        self.decode(group.prompt.token_ids),
                        self.decode(rollout.response_ids),
                        {
                            **group.prompt.fields,
                            "response_length": str(len(rollout.response_ids)),
                            "max_new_tokens": limit,
                        },
                    )
                    for group in groups
                    for rollout in group.rollouts
                ]
            )
        self.report.add_reward_troubles(table)
        ends = np.cumsum([len(group.rollouts) for group in groups])[:-1]
        by_function = {name: np.split(values, ends) for name, values in table.by_function.items()}
        return [
            Experience(group, rewards, {name: parts[i] for name, parts in by_function.items()}, np.zeros_like(rewards))
            for i, (group, rewards) in enumerate(zip(groups, np.split(table.totals, ends), strict=True))
        ]

    def with_advantages(self, experiences: list[Experience]) -> list[Experience]:
        """Over the whole step, so that no advantage depends on how many ranks there are."""
        with self.timers("adv"):
            batch = RewardBatch(
                [e.rewards for e in experiences],
                [np.array([len(rollout.response_ids) for rollout in e.group.rollouts]) for e in experiences],
            )
            values = compute_advantages(self.config.algorithm.advantage, batch)
        return [replace(e, advantages=np.array(a, np.float32)) for e, a in zip(experiences, values, strict=True)]

    def with_log_probs(self, experiences: list[Experience]) -> list[Experience]:
        groups = [sequences(e) for e in experiences]
        for phase, scorer, field in (
            ("ref", self.reference, "reference_log_probs"),
            ("old_log_prob", self.old, "old_log_probs"),
        ):
            if scorer is not None:
                with self.timers(phase):
                    rows = scorer(groups)
                    self.timers.compile(scorer.compile_s)
                experiences = [replace(e, **{field: row}) for e, row in zip(experiences, rows, strict=True)]
        return experiences

    def update(self, experiences: list[Experience], step: int) -> list[Update]:
        """`num_iterations` passes over the step's groups, each in `updates_per_iteration` optimizer updates."""
        algorithm = self.config.algorithm
        per_step = algorithm.num_iterations * algorithm.updates_per_iteration
        updates = []
        with self.timers("update_actor"), self.progress("update", per_step, "updates") as advance:
            for index in range(per_step):
                part = self.mini_batch(experiences, index % algorithm.updates_per_iteration)
                rate = learning_rate(self.config.optimizer, (step - 1) * per_step + index, self.total_steps * per_step)
                updates.append(self.one_update(part, rate, advance))
                self.timers.compile(updates[-1].compile_s)
        return updates

    def reshard(self) -> None:
        """The next step generates with the updated weights."""
        if self.publish:
            with self.timers("reshard"):
                self.report.add_reshard(self.publish())

    def mini_batch(self, experiences: list[Experience], index: int) -> list[Experience]:
        """Every so many groups: in strides, because blocks of each rank's share would differ with the number of
        ranks.
        """
        return experiences[index :: self.config.algorithm.updates_per_iteration]

    def one_update(self, experiences: list[Experience], rate: float, progress: Callable[[float], None]) -> Update:
        groups = [sequences(e) for e in experiences]
        lengths = np.array([len(response) for group in groups for response in group.responses])
        totals = self.training.sum(batch_totals(lengths))
        limit = self.config.rollout.max_new_tokens
        return self.updater(
            groups,
            rate,
            weights=[
                [
                    token_weights(np.ones((1, len(r))), self.aggregation, totals, max_tokens=limit)[0]
                    for r in group.responses
                ]
                for group in groups
            ],
            advantages=[
                [np.full(len(r), a, np.float32) for r, a in zip(group.responses, e.advantages, strict=True)]
                for group, e in zip(groups, experiences, strict=True)
            ],
            progress=progress,
            **{
                name: [getattr(e, name) for e in experiences]
                for name in ("old_log_probs", "reference_log_probs")
                if getattr(experiences[0], name) is not None
            },
        )


def sequences(experience: Experience) -> SequenceGroup:
    """The token ids of a group."""
    group = experience.group
    return SequenceGroup(group.prompt.token_ids, tuple(rollout.response_ids for rollout in group.rollouts))
