"""GRPO loop; a step reads like the algorithm (Shao et al. 2024, algorithm 1).

Algorithms of the family differ in these parts: the groups of a step (`source`), advantages and the KL term
(`credit`), the policy's loss (`parts.policy`), a reference and a critic (`parts`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mindrlhf.configs.grpo import GRPOSettings, OptimizerSettings
from mindrlhf.evaluation.validation import Validation
from mindrlhf.metrics.experience import token_counts
from mindrlhf.metrics.progress import Advance
from mindrlhf.metrics.timer import STEP
from mindrlhf.model_roles import POLICY, REFERENCE, TRAINED, Role
from mindrlhf.roles.exchange import Exchange
from mindrlhf.roles.parts import Parts
from mindrlhf.run.report import StepRecord
from mindrlhf.run.run import Run
from mindrlhf.run.step_report import StepResult
from mindrlhf.trainer.credit import Credit
from mindrlhf.trainer.dynamic_sampling import mark_trained, with_drawing_policy
from mindrlhf.trainer.sources import Source
from mindrlhf.training.optimizer import learning_rate
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience, with_missing


@dataclass(frozen=True)
class GRPOLoop:
    """Order of a step's phases.

    source: of the experiences. credit: None on ranks without the policy. exchange: with ranks that only score.
    validation: None without held-out problems.
    """

    config: GRPOSettings
    source: Source
    parts: Parts
    credit: Credit | None
    run: Run
    exchange: Exchange = field(default_factory=Exchange)
    validation: Validation | None = None

    def steps(self) -> Iterator[StepRecord]:
        """Train on each step's experiences until the source ends; yields each step."""
        run = self.run
        yield from run.validate_first(self.validation)
        for step in self.source.steps():
            with run.timers(STEP):
                experiences, figures = self.source.collect(step)
                result = self.train(experiences, step, figures)
                result = result.with_figures(self.source.settle())
                self.reshard()
                run.validate(self.validation, step)
            yield run.record(step, result, self.source.position)
        run.checkpointer.finish()

    def reshard(self) -> None:
        """Bring the updated weights to the graphs that generate."""
        part = self.parts.publishing
        if part and part.publishes:
            with self.run.timers("reshard"):
                self.run.report.add_reshard(part.publish())

    def train(self, experiences: list[Experience], step: int, figures: Mapping[str, float]) -> StepResult:
        """Compute log-probs and values of this rank's share, advantages over all, and update."""
        policy = self.parts.policy
        reference = self.parts.get(REFERENCE.name)
        experiences = self.marked(experiences, step)
        own = self.exchange.with_scores(self.with_log_probs(policy.data_parallel.share(experiences)))
        with self.run.timers("adv"):
            own = self.credit(experiences, own)
        own = self.exchange.with_returns(own)
        other_updates = self.update_others(own, step)
        updates = self.update_policy(own, step)
        if self.credit.kl:
            self.run.report.add_values(self.credit.kl.steer(own))
        if reference and reference.following.due(step):
            with self.run.timers("sync_ref"):
                reference.follow(policy)
        return StepResult(own, updates, other_updates, figures)

    def marked(self, experiences: Sequence[Experience], step: int) -> list[Experience]:
        """Mark the responses of all ranks that train, and the policies that drew them."""
        scheduled = step - self.config.trainer.staleness  # groups of older weights were carried over
        return with_drawing_policy(mark_trained(experiences, self.config), scheduled)

    def with_log_probs(self, experiences: list[Experience]) -> list[Experience]:
        """Add the scores, and log-probs of the old policy, if still missing."""
        experiences = self.parts.with_scores(experiences, self.run.timers)
        if self.parts.policy.scores_old:
            experiences = with_missing(experiences, "old_log_probs", [e.rows("scored_log_probs") for e in experiences])
        return experiences

    def update_others(self, experiences: list[Experience], step: int) -> dict[Role, list[Update]]:
        """Make a step's updates of roles trained alongside the policy."""
        return {
            part.role: self.update(part.role, part.update, part.settings.optimizer, experiences, step)
            for part in self.parts.trained()
        }

    def update_policy(self, experiences: list[Experience], step: int) -> list[Update]:
        """Make the policy's updates of a step; none while other roles warm up.

        If they are not scored, the step's first update gives the old policy's log-probs: it has used all groups.
        """
        seen: list[Update] = []
        policy = self.parts.policy
        kl = self.credit.kl

        def one_update(part: Sequence[Experience], rate: float, advance: Advance) -> Update:
            if seen and not policy.scores_old:
                part = with_missing(part, "old_log_probs", seen[0].outputs)
            seen.append(policy.update(part, rate, advance, kl.coefficient if kl else None))
            return seen[-1]

        others = [role for role in TRAINED if role.settings and role.used(self.config)]
        warmup_steps = max((getattr(self.config, role.settings).warmup_steps for role in others), default=0)
        return self.update(POLICY, one_update, self.config.optimizer, experiences, step, warmup_steps)

    def update(
        self,
        role: Role,
        one_update: Callable[..., Update],
        settings: OptimizerSettings,
        experiences: list[Experience],
        step: int,
        warmup_steps: int = 0,
    ) -> list[Update]:
        """Make `num_iterations` passes, each in `updates_per_iteration` optimizer updates.

        A mini-batch is every n-th group: blocks of each rank's share would depend on the number of ranks.
        warmup_steps: first steps without an update; the learning rate schedule starts after them.
        """
        parts = self.config.algorithm.updates_per_iteration
        updates = []
        per_step = self.config.algorithm.num_iterations * parts
        done, total = ((steps - warmup_steps) * per_step for steps in (step - 1, self.run.total_steps))
        if done < 0:
            return updates
        tokens = self.config.algorithm.num_iterations * token_counts(experiences)[0]
        with self.run.timers(role.training.phase), self.run.progress("update", tokens, "tokens") as advance:
            for index in range(per_step):
                rate = learning_rate(settings, done + index, total)
                updates.append(one_update(experiences[index % parts :: parts], rate, advance))
        return updates


class ScoringLoop(GRPOLoop):
    """Loop of a rank that only scores, and trains a critic."""

    def train(self, experiences: list[Experience], step: int, figures: Mapping[str, float]) -> StepResult:
        """Score this rank's share for the others, and make its own updates."""
        part = next(self.parts.scoring())
        own = part.data_parallel.share(self.marked(experiences, step))
        own = self.parts.with_scores(own, self.run.timers)
        own = self.exchange.with_returns(self.exchange.with_scores(own))
        return StepResult([], [], self.update_others(own, step), figures, scored=own)


class GeneratingLoop(GRPOLoop):
    """Loop of a rank that only generates: other ranks update meanwhile."""

    def train(self, experiences: list[Experience], step: int, figures: Mapping[str, float]) -> StepResult:
        """Leave the updates to other ranks."""
        return StepResult([], [], figures=figures)
