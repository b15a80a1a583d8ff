"""The GRPO loop. One step reads top to bottom like the algorithm (Shao et al. 2024, algorithm 1).

What differs between the members of the family stands in the parts: which groups a step takes (`sampling`), advantages
(`advantages`), the policy's loss (`policy`), a KL term (`kl_term`, `reference`), a critic (`critic`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mindrlhf.configs.grpo import GRPOConfig, OptimizerSettings
from mindrlhf.data.stream import PromptStream
from mindrlhf.evaluation.validation import Validation
from mindrlhf.metrics.progress import Progress
from mindrlhf.metrics.timer import STEP, Timers
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.reshard.online import ReshardStatistics
from mindrlhf.roles.critic import Critic
from mindrlhf.roles.policy import Advance, PolicyUpdates, sequences
from mindrlhf.roles.reference import Reference
from mindrlhf.rollout.engine import Statistics
from mindrlhf.rollout.scored import Rollouts
from mindrlhf.run.checkpointer import Keeper
from mindrlhf.run.step_report import StepReport, StepResult
from mindrlhf.trainer.advantages import StepAdvantages
from mindrlhf.trainer.dynamic_sampling import StepSampling, left_in, with_drawing_policy
from mindrlhf.trainer.kl_term import KLTerm
from mindrlhf.training.schedule import learning_rate
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience


@dataclass
class GRPOTrainer:
    """Everything a step needs, built by `trainer.build`; this class only says in which order it happens.

    stream, rollouts, sampling: None for a replay. old: scores with the policy before a step's updates; None where the
    first update sees all of a step, and takes its own values. reference, kl: None when beta is 0. critic: None without
    one. publish: brings the updated weights to the graphs that generate; None where they are the same. generating,
    training: which share of a step's prompts this rank answers, and of its experiences it trains on; the ranks that
    share a replica have the same. gather: the experiences of all ranks, in order, from each one's own. total_steps:
    length of the run, for schedules. keeper: saves the run, and may end it. validation: None without held-out problems.
    """

    config: GRPOConfig
    stream: PromptStream | None
    rollouts: Rollouts | None
    sampling: StepSampling | None
    reference: Reference | None
    old: Scorer | None
    critic: Critic | None
    advantages: StepAdvantages
    policy: PolicyUpdates
    kl: KLTerm | None
    publish: Callable[[], ReshardStatistics] | None
    generating: DataParallel
    training: DataParallel
    gather: Callable[[list[Experience]], list[Experience]]
    report: StepReport
    timers: Timers
    progress: Progress
    total_steps: int
    keeper: Keeper
    validation: Validation | None

    def fit(self) -> None:
        """Generates and trains until `total_steps` steps are done."""
        if self.validation and self.config.trainer.val_before_train and self.keeper.first_step == 1:
            self.validate_only()
        for step in range(self.keeper.first_step, self.total_steps + 1):
            with self.timers(STEP):
                experiences, figures = self.collect(step)
                result = self.train(experiences, step, figures)
                self.reshard()
                self.validate(step)
            self.record(step, result, self.rollouts.statistics, self.stream.position)
        self.keeper.finish()

    def replay(self, steps: Sequence[tuple[int, list[Experience]]]) -> None:
        """Trains on recorded rollouts (`records`), as the run that made them did."""
        for step, experiences in steps[self.keeper.first_step - 1 :]:
            with self.timers(STEP):
                result = self.train(experiences, step)
            self.record(step, result)
        self.keeper.finish()

    def record(self, step: int, result: StepResult, generation: Statistics | None = None, position: int = 0) -> None:
        """Metrics, rollouts and checkpoint of a step that is done. What that takes is part of the next step's time: its
        own is in what is written here.
        """
        with self.timers(STEP):
            with self.timers("report"):
                self.report.write(step, result, generation, position)
            self.keeper.after_step(step, self.report.last, result.updates)

    def validate_only(self) -> None:
        """Accuracy on held-out problems of the weights as they are, before any further step."""
        step = self.keeper.first_step - 1
        with self.timers("testing"):
            values = self.validation(step)
        self.timers.collect()
        self.report.write_validation(step, values)

    def validate(self, step: int) -> None:
        """Accuracy on held-out problems, when it is due, as metrics of the step."""
        if self.validation and self.validation.due(step):
            with self.timers("testing"):
                self.report.add_values(self.validation(step))
                self.timers.compile(self.validation.compile_s)

    def reshard(self) -> None:
        """The next step generates with the updated weights."""
        if self.publish:
            with self.timers("reshard"):
                self.report.add_reshard(self.publish())

    def collect(self, step: int) -> tuple[list[Experience], dict[str, float]]:
        """Generates and scores, in one round or, with dynamic sampling, in several; all ranks get all experiences."""
        self.rollouts.statistics = Statistics()
        self.sampling.begin()
        while prompts := self.sampling.wanted():
            own = self.generating.share(self.sampling.numbered(self.stream.next(prompts)))
            scored = self.rollouts(own, step)
            self.keeper.between_phases()
            self.sampling.add(self.gather(scored))
        return self.sampling.take()

    def train(self, experiences: list[Experience], step: int, figures: dict[str, float] | None = None) -> StepResult:
        """Log-probs, values and updates of this rank's share; advantages over all experiences."""
        experiences = with_drawing_policy(left_in(experiences, self.config), step)
        own = self.with_log_probs(self.training.share(experiences))
        with self.timers("adv"):
            own = self.advantages(experiences, own)
        critic_updates = self.update_critic(own, step)
        updates = self.update_policy(own, step)
        figures = {**(figures or {}), **(self.kl.steer(own) if self.kl else {})}
        if self.reference and self.reference.due(step):
            with self.timers("sync_ref"):
                self.reference.follow()
        return StepResult(own, updates, critic_updates, figures)

    def with_log_probs(self, experiences: list[Experience]) -> list[Experience]:
        """With the reference's and the old policy's log-probs and the critic's values, where there are such and a group
        kept from an earlier step does not have its own.
        """
        groups = [sequences(e) for e in experiences]
        for phase, scorer, field in (
            ("ref", self.reference, "reference_log_probs"),
            ("old_log_prob", self.old, "old_log_probs"),
            ("values", self.critic, "values"),
        ):
            if scorer is not None:
                with self.timers(phase):
                    rows = scorer(groups)
                    self.timers.compile(scorer.compile_s)
                experiences = [
                    replace(e, **{field: getattr(e, field) or row}) for e, row in zip(experiences, rows, strict=True)
                ]
        return experiences

    def update_critic(self, experiences: list[Experience], step: int) -> list[Update]:
        if self.critic is None:
            return []
        return self.update("update_critic", self.critic.update, self.critic.settings.optimizer, experiences, step)

    def update_policy(self, experiences: list[Experience], step: int) -> list[Update]:
        """Nothing while the critic warms up; the schedule counts from there.

        Without a pass of its own, the old policy's log-probs are what the step's first update gave: it has seen all
        groups.
        """
        seen: list[Update] = []

        def one_update(part: Sequence[Experience], rate: float, advance: Advance) -> Update:
            if seen and self.old is None:
                part = [
                    replace(e, old_log_probs=e.old_log_probs or rows)
                    for e, rows in zip(part, seen[0].outputs, strict=True)
                ]
            seen.append(self.policy(part, rate, advance))
            return seen[-1]

        waits = self.critic.settings.warmup_steps if self.critic else 0
        return self.update("update_actor", one_update, self.config.optimizer, experiences, step, waits)

    def update(
        self,
        phase: str,
        one_update: Callable[..., Update],
        settings: OptimizerSettings,
        experiences: list[Experience],
        step: int,
        waits: int = 0,
    ) -> list[Update]:
        """`num_iterations` passes over the step's groups, each in `updates_per_iteration` optimizer updates.

        A mini-batch is every so many groups: blocks of each rank's share would differ with the number of ranks.
        waits: first steps without an update.
        """
        parts = self.config.algorithm.updates_per_iteration
        per_step = self.config.algorithm.num_iterations * parts
        done, total = (step - waits - 1) * per_step, (self.total_steps - waits) * per_step
        updates = []
        if done < 0:
            return updates
        with self.timers(phase), self.progress("update", per_step, "updates") as advance:
            for index in range(per_step):
                rate = learning_rate(settings, done + index, total)
                updates.append(one_update(experiences[index % parts :: parts], rate, advance))
                self.timers.compile(updates[-1].compile_s)
        return updates
