"""Report of a run's steps: metrics over all ranks, written by the first."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mindrlhf.backend.ceiling import matmul_ceiling
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.model_card import METRICS, ModelCard
from mindrlhf.files.settings_file import write_settings
from mindrlhf.files.text import folded
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency
from mindrlhf.metrics.diagnosis import Diagnosis
from mindrlhf.metrics.experts import add_experts, with_entropy
from mindrlhf.metrics.flops import GroupLengths, Utilization
from mindrlhf.metrics.metric_set import MetricSet, reduce
from mindrlhf.metrics.performance import add_performance, add_training
from mindrlhf.metrics.timer import STEP, Timers
from mindrlhf.metrics.tower_flops import tower_flops
from mindrlhf.metrics.writers import Writers, open_writers
from mindrlhf.models.vision.fixed_tower import open_known_rows
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.parallel.partition import Partition
from mindrlhf.records.writer import parts_folder
from mindrlhf.run.outputs import Outputs, forget_after
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.updater import Update
from mindrlhf.units import GIB

_log = logging.getLogger(__name__)


class RunData(Protocol):
    """Data that every kind of run has.

    rows: number of rows in the dataset. total_steps: number of steps of the run.
    """

    rows: int
    total_steps: int

    def fingerprint(self) -> dict[str, int]:
        """Describe data that a resumed run must find unchanged: name -> count or checksum."""

    def card(self, config: Any, path: str | None) -> ModelCard:
        """Make the card of the trained model; path: of its first weights."""


@dataclass(frozen=True, eq=False)
class StepRecord:
    """Record of a written step, or of a validation before further steps.

    total: steps of the run. metrics: over all ranks. checkpoint: its folder, if it has one.
    """

    step: int
    total: int
    metrics: Mapping[str, float]
    checkpoint: Path | None = None


class Report:
    """Collector of a step's metrics on every rank; the first writes them after `open_outputs`.

    Each kind of run has a subclass that measures its steps. Of the ranks that train on the same rows, only one reports.
    iterations: passes of updates over a step's rows. last: the metrics of the last step. finished: set it when the run
    has done its last step. forecast_s: seconds of a step, if known; set it before `open_outputs`. known_rows: of
    images, which the run's models share; None if a vision tower trains, or without one.
    """

    def __init__(
        self,
        job: Job,
        data: RunData,
        collectives: Collectives,
        timers: Timers,
        residency: Residency,
        iterations: int = 1,
    ):
        updates = job.updates(collectives.world.rank)
        training = Partition.of_yaml(updates, job.model, collectives.world.rank)
        ceiling = matmul_ceiling(collectives.world.device_target, job.train.model.compute_dtype)
        self._job = job
        self._data = data
        self._gather = collectives.all_gather_object
        self._ranks = collectives.size
        self._replicas = Mesh.of_yaml(updates).replicas
        self._own_rows = training is not None and training.first_of_replica
        self._timers = timers
        self._residency = residency
        self._utilization = Utilization(job.roles, ceiling, iterations)
        self.known_rows = open_known_rows(job.model, job.config.train.tower_cache_gb)
        self._metrics = MetricSet()
        self._diagnosis = Diagnosis()
        self._writers: Writers | None = None
        self._outputs = Outputs(job.output, job.flags.save_data_file and parts_folder(job.flags.save_data_file))
        self.last: dict[str, float] = {}
        self.finished = False
        self.forecast_s: float | None = None

    def open_outputs(self, steps_done: int) -> None:
        """Open the run's outputs on the first rank; remove outputs of steps after `steps_done`."""
        settings = self._job.config.trainer
        output = self._job.output
        tracking = settings.model_copy(update={"loggers": ("console",)} if settings.val_only else {})
        total = self._data.total_steps
        start = steps_done + 1 if steps_done else 0
        settings_shown = self._job.config.model_dump(mode="json")
        self._writers = open_writers(output, tracking, total, start, settings_shown, self.forecast_s)
        if not settings.val_only:
            write_settings(output, self._job.described(), resumed=steps_done > 0)
            if steps_done:
                forget_after(output, steps_done)

    def add_values(self, values: Mapping[str, float]) -> None:
        """Add values of the step that are the same on all ranks."""
        for name, value in values.items():
            self._metrics.add_max(name, value)

    def write_validation(self, step: int, values: Mapping[str, float]) -> None:
        """Write values measured on held-out data between `step` and the next step."""
        if self._writers:
            self._writers.write(step, values)

    def _begin(self) -> tuple[MetricSet, dict[str, float]]:
        """Take the step's metrics so far, and its seconds by phase."""
        metrics = self._metrics
        self._metrics = MetricSet()
        seconds = self._timers.collect()
        self._residency.report(metrics)
        return metrics, seconds

    def _of_images(self, metrics: MetricSet) -> dict[str, float]:
        """Add figures of the known rows.

        Returns the operations of a tower that is in no phase.
        """
        if self.known_rows is None:
            return {}
        found, computed = self.known_rows.collect()
        metrics.add("vision/cache_hit_rate", found, found + len(computed))
        metrics.add_max("vision/cache_gb", self.known_rows.nbytes / GIB)
        return {STEP: sum(tower_flops(self._job.model, [picture.grid for picture in computed]))}

    def _reduce(self, metrics: MetricSet, step: int, position: int) -> dict[str, float]:
        """Reduce a step's metrics over all ranks; position: rows drawn."""
        add_training(metrics, step, position / max(self._data.rows, 1))
        return self._utilization.within_ceiling(with_entropy(reduce(metrics, self._gather).results()))

    def _show(self, step: int, values: dict[str, float]) -> None:
        """Write a step's values, and log the hints derived from them."""
        self.last = values
        if self._writers:
            self._writers.write(step, values)
            for hint in self._diagnosis.look(step, values):
                _log.warning("%s", folded(f"hint at step {step}: {hint.text}", 2))

    def _add_update(self, metrics: MetricSet, update: Update, role: str, loss: str) -> None:
        """Add the outcome of an optimizer update; loss: name of its loss."""
        share = 1.0 / self._replicas
        metrics.add(loss, update.loss, share)
        metrics.add(f"{role}/grad_norm", update.result.grad_norm)
        metrics.add(f"{role}/lr", update.result.learning_rate)
        metrics.add_total(f"{role}/skipped_updates", share * update.result.failed)
        metrics.add_total(f"{role}/empty_updates", share * update.result.empty)
        for name, term in update.terms.items():
            metrics.add(f"{role}/{name}", term, share)
        add_experts(metrics, role, update.sides)

    def flush(self) -> None:
        """Wait until all files of the steps so far are on the disk."""
        self._outputs.sync()

    def state_dict(self) -> dict[str, float]:
        """Return the last step's metrics for the model card."""
        return {name: value for name, value in self.last.items() if name.startswith(METRICS) and math.isfinite(value)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.last = {name: float(value) for name, value in state.items()}

    def close(self) -> None:
        if self._writers:
            self._writers.close()


@dataclass(frozen=True, eq=False)
class TuningResult:
    """Results of a step: this rank's demonstrations, and the update from them."""

    pairs: list[SequenceGroup]
    updates: list[Update]


class TuningReport(Report):
    """Report of the steps of fine-tuning, under verl's names."""

    def write(self, step: int, result: TuningResult, position: int = 0) -> None:
        """Write a step's metrics once its timers are closed; position: pairs drawn."""
        if not self._own_rows:
            result = TuningResult([], [])
        metrics, seconds = self._begin()
        for update in result.updates:
            self._add_update(metrics, update, "actor", "train/loss")
        lengths = [pair_lengths(pair) for pair in result.pairs]
        responses = sum(sum(one.responses) for one in lengths)
        tokens = responses + sum(one.prompt for one in lengths)
        add_performance(metrics, seconds, responses, tokens, self._ranks)
        self._utilization.add(metrics, seconds, lengths, counted=self._of_images(metrics))
        self._show(step, self._reduce(metrics, step, position))


def pair_lengths(pair: SequenceGroup) -> GroupLengths:
    """Count the tokens of a pair, and list its images."""
    images = [picture.grid for part in pair.pictures for picture in part]
    return GroupLengths(len(pair.prompt_ids), [len(response) for response in pair.responses], images=images)
