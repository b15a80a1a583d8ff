"""Report of a step: metrics over all ranks under verl's names, and responses."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from mindrlhf.algorithms.mismatch import mismatch_figures, mismatch_sums
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.files.naming import ROLLOUTS_FOLDER
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency
from mindrlhf.metrics.completions import print_best_and_worst
from mindrlhf.metrics.experience import (
    add_conversations,
    add_experience,
    add_log_prob_difference,
    add_reward_components,
    add_reward_troubles,
    add_turns,
    token_counts,
)
from mindrlhf.metrics.flops import GroupLengths, group_lengths
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.metrics.performance import add_idle, add_performance
from mindrlhf.metrics.timer import Timers
from mindrlhf.model_roles import POLICY, REWARD_MODEL, ROLES, SCORE, Role, role_of
from mindrlhf.phases import PHASES, Phase
from mindrlhf.records.writer import RecordParts, ResponseWriter
from mindrlhf.reshard.online import ReshardStatistics
from mindrlhf.rewards.table import RewardTable
from mindrlhf.run.report import Report
from mindrlhf.run.token_figures import of_widest, with_token_figures
from mindrlhf.run.training_data import TrainingData
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience, Rollout, RolloutGroup, taken

_log = logging.getLogger(__name__)

# Objective metric -> (verl's name, aggregated like the loss or averaged over tokens). Names without a group are in the
# group of the role that is updated.
NAMES = {
    "importance_weight_outside": ("rollout_corr/rollout_is_outside", False),
    "pg_loss": ("pg_loss", True),
    "kl": ("kl_loss", True),
    "entropy": ("entropy", False),
    "policy_kl": ("ppo_kl", False),
    "clip_fraction": ("pg_clipfrac", False),
    "dual_clip_fraction": ("pg_clipfrac_lower", False),
    "value": ("vpred_mean", False),
    "value_error": ("value_error", False),
    "value_clip_fraction": ("vf_clipfrac", False),
}


SIDES = {"train": "trainer", "infer": "generator", SCORE: "scorer"}  # of a split job's layouts, in metrics


@dataclass(frozen=True, eq=False)
class StepResult:
    """Results of a step: this rank's experiences and updates, and rank-independent values.

    updates: the policy's. other_updates: of roles that are trained alongside it. scored: experiences of a rank that
    only scores.
    """

    experiences: list[Experience]
    updates: list[Update]
    other_updates: Mapping[Role, list[Update]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    scored: Sequence[Experience] = ()

    def with_figures(self, figures: Mapping[str, float]) -> "StepResult":
        """Add rank-independent values."""
        return replace(self, figures={**self.figures, **figures})


class StepReport(Report):
    """Report of the steps of a GRPO run, with their responses."""

    def __init__(self, job: Job, data: TrainingData, collectives: Collectives, timers: Timers, residency: Residency):
        super().__init__(job, data, collectives, timers, residency, job.config.algorithm.num_iterations)
        settings = job.config.trainer
        self._records = settings.save_rollouts or (job.flags.save_data_file is not None and not settings.val_only)
        self._responses: ResponseWriter | None = None
        self._scoring_flops = 0.0  # of this rank's reward models in the step so far
        self._side: str | None = None  # of ranks that train, ranks that generate, and ranks that only score
        self._elsewhere: list[str] = []  # phases of other sides, for the tokens of a rank that trains
        if job.splits:
            layout = job.layout(collectives.world.rank)
            self._side = SIDES[layout]
            self._ranks = len(job.yamls[layout].ranks)
            if layout == "train":
                self._elsewhere = [name for name, phase in PHASES.items() if _is_elsewhere(phase, job)]
        self._drawn: list[GroupLengths] = []  # lengths of groups that the step has generated for later steps
        self._scored: list[GroupLengths] = []  # and of those that it has scored for them

    def open_outputs(self, steps_done: int) -> None:
        super().open_outputs(steps_done)
        job = self._job
        record = None
        if (file := job.flags.save_data_file) and not self._job.config.trainer.val_only:
            record = RecordParts(file, steps_done)
            if record.missing:
                last = record.missing[-1]
                print(f"{file}: the rollouts of steps 1 to {last} are not beside it and are left out")
        if self._records:
            folder = job.output / ROLLOUTS_FOLDER if self._job.config.trainer.save_rollouts else None
            self._responses = ResponseWriter(folder, record, job.tokenizer.decode)

    def add_reward_table(self, table: RewardTable) -> None:
        """Add further numbers of functions, and count failures.

        Each function's first failure is logged with its completion.
        """
        self._scoring_flops += table.operations
        add_reward_components(self._metrics, table.components)
        add_reward_troubles(self._metrics, table.failures, table.timeouts)
        for failure in table.first_failures:
            what = f"reward function {failure.function} failed ({failure.reason}); the sample counts as unscored"
            _log.warning("%s, and this is shown once. Completion: %r", what, failure.completion[:200])

    def add_generation(self, statistics: Any) -> None:
        """Add a generation call's token rate and its share of accepted draft tokens."""
        if statistics.seconds:
            self._metrics.add("perf/generation_tokens_per_s", statistics.tokens, statistics.seconds)
        if statistics.drafted:
            self._metrics.add("perf/draft_acceptance_rate", statistics.accepted, statistics.drafted)

    def add_drawn(self, experiences: Sequence[Experience]) -> None:
        """Count the generation of experiences that the step leaves out.

        Each is counted on one rank.
        """
        self._drawn += [group_lengths(e) for e in experiences]

    def add_scored(self, experiences: Sequence[Experience]) -> None:
        """Count the scoring of experiences for later steps.

        Each is counted on one rank.
        """
        self._scored += [group_lengths(e) for e in experiences]

    def add_conversations(self, statistics: Any) -> None:
        """Add statistics of conversations.

        statistics: None without any, or where another rank has them.
        """
        if statistics:
            add_conversations(self._metrics, **vars(statistics))

    def add_turns(self, groups: Sequence[RolloutGroup]) -> None:
        """Add the turns of conversations."""
        add_turns(self._metrics, groups)

    def add_reshard(self, done: ReshardStatistics) -> None:
        """Add resharded bytes of all ranks, and bytes received per second of rank time."""
        for name in ("bytes_received", "bytes_copied", "bytes_shared"):
            self._metrics.add_total(f"reshard/{name}", getattr(done, name))
        self._metrics.add("reshard/bytes_per_s", done.bytes_received, done.seconds)
        self._metrics.add_max("perf/weight_sync_s", done.seconds)

    def write(self, step: int, result: StepResult, position: int = 0) -> None:
        """Write a step's metrics once its timers are closed; position: prompts drawn."""
        if not self._own_rows:
            result = StepResult([], [], figures=result.figures)
        scored = [*(group_lengths(e) for e in (*result.experiences, *result.scored)), *self._scored]
        self._scored = []
        experiences = result.experiences
        updates = result.updates
        metrics, seconds = self._begin()
        add_experience(metrics, experiences, self._data.longest_prompt)
        for role, made in {POLICY: updates, **result.other_updates}.items():
            for update in made:
                self._add_update(metrics, update, role.training.metrics, role.training.loss)
        if any("old_log_probs" not in e.tokens for e in experiences):  # otherwise `add_experience` has added them
            pairs = first_scored(experiences, updates)
            add_log_prob_difference(metrics, [rollout for rollout, _ in pairs], [train for _, train in pairs])
        add_performance(metrics, seconds, *token_counts(experiences), self._ranks, self._elsewhere)
        if self._side:
            add_idle(metrics, seconds, self._side)
        drawn = [*self._drawn, *(group_lengths(e) for e in experiences if e.policy_step == step)]
        self._drawn = []
        counted = {REWARD_MODEL.scoring.phase: self._scoring_flops, **self._of_images(metrics)}
        self._scoring_flops = 0.0
        self._utilization.add(metrics, seconds, scored, drawn, counted)
        values = self._reduce(metrics, step, position)
        values |= result.figures | explained_variance(values)
        if self._job.config.rollout_correction.level is not None:
            values |= self._mismatch(experiences, updates)
        self._show(step, values)
        if self._writers and self._completions_due(step):
            print_best_and_worst(step, experiences, partial(self._job.tokenizer.decode, skip_special_tokens=True))
        if self._records:
            self._record_responses(step, result)

    def _completions_due(self, step: int) -> bool:
        """Test whether the console shows answers of this step."""
        settings = self._job.config.trainer
        every = settings.log_completions_every if "console" in settings.loggers else None
        return every is not None and (step % every == 0 or step in (1, self._data.total_steps))

    def _mismatch(self, experiences: list[Experience], updates: list[Update]) -> dict[str, float]:
        """Compute `algorithms.mismatch` of rollout and trained distribution over all ranks."""
        pairs = first_scored(experiences, updates)
        sampled = [rollout.sampled for rollout, _ in pairs]
        drawn = taken([rollout.row("behaviour_log_probs") for rollout, _ in pairs], sampled)
        sums = mismatch_sums(taken([row for _, row in pairs], sampled), drawn)
        figures = mismatch_figures(sum(self._gather(sums)))
        return {f"rollout_corr/{name}": value for name, value in figures.items()}

    def _add_update(self, metrics: MetricSet, update: Update, role: str, loss: str) -> None:
        super()._add_update(metrics, update, role, loss)
        for name, groups in update.metrics.items():
            shown, like_loss = NAMES.get(name, (name, False))
            shown = shown if "/" in shown else f"{role}/{shown}"
            if like_loss:
                metrics.add(shown, update.weighted[name], 1.0 / self._replicas)
            else:
                metrics.add_values(shown, np.concatenate([row for group in groups for row in group]))

    def _record_responses(self, step: int, result: StepResult) -> None:
        """Record all ranks' responses, without the arrays that a replay makes again."""
        parts = self._job.config.algorithm.updates_per_iteration
        most = self._job.config.trainer.token_figures
        described = with_token_figures(result.experiences, result.updates, parts, most)
        gathered = self._gather([replace(experience, tokens={}) for experience in described])
        if self._responses:
            self._responses.add(step, of_widest([experience for part in gathered for experience in part], most))

    def flush(self) -> None:
        if self._responses:
            self._responses.flush()
        super().flush()

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._responses:
                self._responses.close(self.finished)


def _is_elsewhere(phase: Phase, job: Job) -> bool:
    """Test for a phase that only other ranks than those that train have."""
    role = ROLES[phase.role]
    used = {role_of(name).name for name in job.roles}
    return phase.kind is not None and role.name in used and role.layout_in(job.yamls) != "train"


def first_scored(experiences: Sequence[Experience], updates: Sequence[Update]) -> list[tuple[Rollout, np.ndarray]]:
    """Select responses with the train graph's log-probs of the step's first policy.

    These are all responses if old log-probs were computed, else the first mini-batch, whose update computed them.
    """
    if not experiences:
        return []
    scored = [e.tokens.get("old_log_probs") for e in experiences]
    if any(rows is None for rows in scored):
        scored = updates[0].outputs if updates else []
    of = experiences[:: len(experiences) // len(scored)] if scored else []
    return [pair for e, rows in zip(of, scored, strict=True) for pair in zip(e.group.rollouts, rows, strict=True)]


def explained_variance(values: Mapping[str, float]) -> dict[str, float]:
    """Compute `critic/vf_explained_var`, 1 - var(return - value) / var(return)."""
    error = values.get("critic/return_error/std")
    spread = values.get("critic/returns/std")
    return {"critic/vf_explained_var": 1.0 - (error / spread) ** 2} if error is not None and spread else {}
