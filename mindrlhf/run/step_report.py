"""Report of a step: metrics over all ranks under verl's names, and responses."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mindrlhf.algorithms.mismatch import mismatch_figures, mismatch_sums
from mindrlhf.backend.ceiling import matmul_ceiling
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.model_card import METRICS
from mindrlhf.files.naming import ROLLOUTS_FOLDER
from mindrlhf.files.settings_file import write_settings
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency
from mindrlhf.metrics.diagnosis import Diagnosis
from mindrlhf.metrics.experience import (
    add_conversations,
    add_experience,
    add_log_prob_difference,
    add_reward_troubles,
    token_counts,
)
from mindrlhf.metrics.flops import Utilization
from mindrlhf.metrics.metric_set import MetricSet, reduce
from mindrlhf.metrics.performance import add_performance, add_training
from mindrlhf.metrics.timer import Timers
from mindrlhf.metrics.writers import Writers, open_writers
from mindrlhf.parallel.partition import Partition
from mindrlhf.records.writer import RecordParts, ResponseWriter
from mindrlhf.reshard.online import ReshardStatistics
from mindrlhf.rewards.table import RewardTable
from mindrlhf.run.outputs import forget_after
from mindrlhf.run.training_data import TrainingData
from mindrlhf.training.updater import Update
from mindrlhf.types import Experience, Rollout, taken

_log = logging.getLogger(__name__)

# Objective metric -> (verl's name, aggregated like the loss or averaged over tokens).
NAMES = {
    "importance_weight_outside": ("rollout_corr/rollout_is_outside", False),
    "pg_loss": ("actor/pg_loss", True),
    "kl": ("actor/kl_loss", True),
    "entropy": ("actor/entropy", False),
    "policy_kl": ("actor/ppo_kl", False),
    "clip_fraction": ("actor/pg_clipfrac", False),
    "dual_clip_fraction": ("actor/pg_clipfrac_lower", False),
    "value": ("critic/vpred_mean", False),
    "value_error": ("critic/value_error", False),
    "value_clip_fraction": ("critic/vf_clipfrac", False),
}


@dataclass(frozen=True, eq=False)
class StepResult:
    """Results of a step: this rank's experiences and updates, and common values."""

    experiences: list[Experience]
    updates: list[Update]
    critic_updates: list[Update] = field(default_factory=list)
    figures: Mapping[str, float] = field(default_factory=dict)


class StepReport:
    """Collector of a step's metrics on every rank; rank 0 writes them after `open_outputs`.

    One rank speaks for those that train on the same rows. last: the metrics of the last step. finished: to be set when
    the run has done its last step.
    """

    def __init__(self, job: Job, data: TrainingData, collectives: Collectives, timers: Timers, residency: Residency):
        config, settings, world = job.config, job.config.trainer, collectives.world
        training = Partition.of_yaml(job.train, job.model, world.rank)
        ceiling = matmul_ceiling(world.device_target, job.train.model.compute_dtype)
        self._job, self._data, self._gather, self._ranks = job, data, collectives.all_gather_object, world.size
        self._replicas, self._own_rows = training.mesh.dp, training.first_of_replica
        self._timers, self._residency = timers, residency
        self._records = settings.save_rollouts or (job.args.save_data_file is not None and not settings.val_only)
        self._utilization = Utilization(job.model, ceiling, config.algorithm.num_iterations)
        self._metrics, self._diagnosis = MetricSet(), Diagnosis()
        self._writers: Writers | None = None
        self._responses: ResponseWriter | None = None
        self.last: dict[str, float] = {}
        self.finished = False

    def open_outputs(self, steps_done: int) -> None:
        """Open the run's outputs on rank 0; those of steps after `steps_done` are forgotten."""
        job, settings, output = self._job, self._job.config.trainer, self._job.output
        tracking = settings.model_copy(update={"loggers": ("console",)} if settings.val_only else {})
        total, start = self._data.total_steps, steps_done + 1 if steps_done else 0
        self._writers = open_writers(output, tracking, total, start, job.config.model_dump(mode="json"))
        record = None
        if not settings.val_only:
            write_settings(output, job.described())
            if steps_done:
                forget_after(output, steps_done)
            if file := job.args.save_data_file:
                record = RecordParts(file, steps_done)
                if record.missing:
                    last = record.missing[-1]
                    print(f"{file}: the rollouts of steps 1 to {last} are not beside it and are left out")
        if self._records:
            folder = output / ROLLOUTS_FOLDER if settings.save_rollouts else None
            self._responses = ResponseWriter(folder, record, job.tokenizer.decode)

    def add_reward_troubles(self, table: RewardTable) -> None:
        """Count calls without a reward; log each function's first with its input."""
        add_reward_troubles(self._metrics, table.failures, table.timeouts)
        for failure in table.first_failures:
            what = f"reward function {failure.function} failed ({failure.reason}); the sample counts as unscored"
            _log.warning("%s, and this is shown once. Completion: %r", what, failure.completion[:200])

    def add_generation(self, tokens: int, seconds: float) -> None:
        """Add the rate of a generation."""
        if seconds:
            self._metrics.add("perf/generation_tokens_per_s", tokens, seconds)

    def add_conversations(self, statistics: Any) -> None:
        """Add a partner's statistics; None where another rank has them, or none are held."""
        if statistics:
            add_conversations(self._metrics, **vars(statistics))

    def add_reshard(self, done: ReshardStatistics) -> None:
        """Add bytes of all ranks, and bytes received per second of ranks' time."""
        for name in ("bytes_received", "bytes_copied", "bytes_shared"):
            self._metrics.add_total(f"reshard/{name}", getattr(done, name))
        self._metrics.add("reshard/bytes_per_s", done.bytes_received, done.seconds)

    def add_values(self, values: Mapping[str, float]) -> None:
        """Add values of the step that are the same on all ranks."""
        for name, value in values.items():
            self._metrics.add_max(name, value)

    def write_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the accuracy measured between `step` and the next one."""
        if self._writers:
            self._writers.write(step, values)

    def write(self, step: int, result: StepResult, position: int = 0) -> None:
        """Write a step's metrics once its timers are closed; position: prompts drawn."""
        if not self._own_rows:
            result = StepResult([], [], figures=result.figures)
        experiences, updates = result.experiences, result.updates
        metrics, self._metrics = self._metrics, MetricSet()
        seconds = self._timers.collect()
        self._residency.report(metrics)
        add_experience(metrics, experiences, self._data.longest_prompt)
        for update in updates:
            self._add_update(metrics, update, "actor", "actor/loss")
        for update in result.critic_updates:
            self._add_update(metrics, update, "critic", "critic/vf_loss")
        if any(e.old_log_probs is None for e in experiences):  # else `add_experience` has taken them
            pairs = first_scored(experiences, updates)
            add_log_prob_difference(metrics, [rollout for rollout, _ in pairs], [train for _, train in pairs])
        add_performance(metrics, seconds, *token_counts(experiences), self._ranks)
        self._utilization.add(metrics, seconds, experiences, step)
        add_training(metrics, step, position / max(self._data.rows, 1))
        values = reduce(metrics, self._gather).results()
        self.last = self._utilization.within_ceiling(values) | result.figures | explained_variance(values)
        if self._job.config.rollout_correction.level is not None:
            self.last |= self._mismatch(experiences, updates)
        if self._writers:
            self._writers.write(step, self.last)
            for hint in self._diagnosis.look(step, self.last):
                _log.warning("hint at step %d: %s", step, hint.text)
        if self._records:
            self._record_responses(step, experiences)

    def _mismatch(self, experiences: list[Experience], updates: list[Update]) -> dict[str, float]:
        """Compute `algorithms.mismatch` of rollout and trained distribution over all ranks."""
        pairs = first_scored(experiences, updates)
        sampled = [rollout.sampled for rollout, _ in pairs]
        drawn = taken([rollout.behaviour_log_probs for rollout, _ in pairs], sampled)
        sums = mismatch_sums(taken([row for _, row in pairs], sampled), drawn)
        figures = mismatch_figures(sum(self._gather(sums)))
        return {f"rollout_corr/{name}": value for name, value in figures.items()}

    def _add_update(self, metrics: MetricSet, update: Update, role: str, loss: str) -> None:
        share = 1.0 / self._replicas
        metrics.add(loss, update.loss, share)
        metrics.add(f"{role}/grad_norm", update.result.grad_norm)
        metrics.add(f"{role}/lr", update.result.learning_rate)
        metrics.add_total(f"{role}/skipped_updates", share * update.result.failed)
        metrics.add_total(f"{role}/empty_updates", share * update.result.empty)
        for name, groups in update.metrics.items():
            shown, like_loss = NAMES.get(name, (f"{role}/{name}", False))
            if like_loss:
                metrics.add(shown, update.weighted[name], share)
            else:
                metrics.add_values(shown, np.concatenate([row for group in groups for row in group]))

    def _record_responses(self, step: int, experiences: list[Experience]) -> None:
        """Record all ranks' responses, without large arrays that a step has computed of them."""
        computed = {"reference_log_probs": None, "old_log_probs": None, "values": None, "returns": None}
        gathered = self._gather([replace(experience, **computed) for experience in experiences])
        if self._responses:
            self._responses.add(step, [experience for part in gathered for experience in part])

    def flush(self) -> None:
        if self._responses:
            self._responses.flush()

    def state_dict(self) -> dict[str, float]:
        """Return the last step's metrics for the model card."""
        return {name: value for name, value in self.last.items() if name.startswith(METRICS) and math.isfinite(value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.last = {name: float(value) for name, value in state.items()}

    def close(self) -> None:
        if self._writers:
            self._writers.close()
        if self._responses:
            self._responses.close(self.finished)


def first_scored(experiences: Sequence[Experience], updates: Sequence[Update]) -> list[tuple[Rollout, np.ndarray]]:
    """Select responses with the train graph's log-probs of the step's first policy.

    All have them where old log-probs were computed, else those of the first mini-batch, which its update has seen.
    """
    if not experiences:
        return []
    scored = [e.old_log_probs for e in experiences]
    if any(rows is None for rows in scored):
        scored = updates[0].outputs if updates else []
    of = experiences[:: len(experiences) // len(scored)] if scored else []
    return [pair for e, rows in zip(of, scored, strict=True) for pair in zip(e.group.rollouts, rows, strict=True)]


def explained_variance(values: Mapping[str, float]) -> dict[str, float]:
    """Compute `critic/vf_explained_var`, 1 - var(return - value) / var(return)."""
    error, spread = values.get("critic/return_error/std"), values.get("critic/returns/std")
    return {"critic/vf_explained_var": 1.0 - (error / spread) ** 2} if error is not None and spread else {}
