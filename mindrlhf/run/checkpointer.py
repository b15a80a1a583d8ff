"""Checkpoints of a run on schedule, and its clean end before the last step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol

import numpy as np

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.finite import first_not_finite, spoiled
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.store import HF_FOLDER, CheckpointStore
from mindrlhf.checkpoint.training_state import (
    CRITIC_WEIGHTS,
    REFERENCE_WEIGHTS,
    WEIGHTS,
    ShardGroup,
    TrainingState,
    check_alike,
)
from mindrlhf.configs.grpo import TrainerSettings
from mindrlhf.errors import UserError
from mindrlhf.files.text import nearest
from mindrlhf.metrics.performance import resident_bytes
from mindrlhf.roles.part import Arrays
from mindrlhf.run.stop_signals import Stopped, StopSignals
from mindrlhf.training.updater import Update
from mindrlhf.units import GIB


class Stateful(Protocol):
    """Object with a small state of plain JSON values that a resumed run needs."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Blob(Protocol):
    """State too large for JSON, encoded only when a checkpoint is written."""

    def snapshot(self) -> Any:
        """Copy the state into a form that later steps do not change."""

    def encode(self, snapshot: Any) -> bytes: ...

    def decode(self, content: bytes) -> None:
        """Restore the state from an encoded snapshot."""


@dataclass(frozen=True)
class Managed:
    """State of this rank in a checkpoint.

    arrays: kind -> its layout, and this rank's parameters of it by the names of the layout. counters, blobs: by name.
    run: see `TrainingState`. hf_files: of the checkpoint's HF folder, on rank 0.
    """

    arrays: Arrays
    counters: Mapping[str, Stateful] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    hf_files: Mapping[str, bytes] = field(default_factory=dict)


class Checkpointer:
    """Saver and restorer of a run, which may also end it.

    Every rank uses it at the same places, after `manage`. saving: entered while a save begins; it has the arrays in
    memory.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        total_steps: int,
        store: CheckpointStore,
        signals: StopSignals,
        collectives: Collectives,
        saving: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._settings, self._total, self._store, self._saving = settings, total_steps, store, saving
        self._signals, self._reduce_max, self._alone = signals, collectives.all_reduce_max, collectives.world.size == 1
        self._best, self._bad = Best(settings.save_best_metric, settings.save_best_mode), BadUpdates()
        self._step, self._saved = 0, None  # steps done; the step of the last checkpoint

    def manage(self, state: Managed) -> None:
        """Take the state that checkpoints are to hold from now on."""
        self._state = state
        self._counters = {**state.counters, "best": self._best, "bad_updates": self._bad}
        self._take_snapshot()

    @property
    def first_step(self) -> int:
        return self._step + 1

    def restore(self, checkpoint: Checkpoint, rank: int) -> None:
        """Restore a checkpoint in any layout, without weights; state it lacks begins fresh."""
        for kind, (layout, parameters) in self._state.arrays.items():
            if kind not in (WEIGHTS, CRITIC_WEIGHTS) and kind in checkpoint.groups:
                stored = checkpoint.weights(kind, layout.shapes)
                for name, parameter in parameters.items():
                    backend.write(parameter, stored.read(name, layout.slices(rank, name)))
        for name, counter in self._counters.items():
            if name in checkpoint.counters:
                with checkpoint.understood(f"counters.{name}"):
                    check_alike(checkpoint.counters[name], counter.state_dict())
                    counter.load_state_dict(checkpoint.counters[name])
        for name, blob in self._state.blobs.items():
            content = checkpoint.companion(name)
            if content is not None:
                with checkpoint.understood(f"the file {name}"):
                    blob.decode(content)
        self._step = self._saved = checkpoint.step
        self._store.best_step = self._best.step
        self._take_snapshot()

    def after_step(self, step: int, metrics: Mapping[str, float], updates: Sequence[Update]) -> None:
        """Save if it is due.

        Raises `Stopped` when the run is asked to stop, `UserError` when it cannot go on; its state is saved then.
        """
        self._store.check()
        bad = self._bad.count(updates)
        best = self._best.improved(metrics, step)
        self._step = step
        self._take_snapshot()
        frequency = self._settings.save_freq
        if best or (frequency and (step % frequency == 0 or step == self._total)):
            self._save(best)
        if bad >= self._settings.max_bad_updates:
            raise UserError(
                f"step {step}: {bad} updates in a row were skipped because a loss or gradient was not finite; lower "
                f"optimizer.lr or look at the samples that were named, {self._leave()}"
            )
        limit = self._settings.max_host_memory_gb
        used = 0.0 if limit is None else self._largest(resident_bytes() / GIB)
        if limit is not None and used > limit:
            raise UserError(
                f"step {step}: a process uses {used:.1f} GiB, and trainer.max_host_memory_gb is {limit:g}; free memory "
                f"or raise the limit, {self._leave()}"
            )
        if step < self._total:
            self.between_phases()

    def between_phases(self) -> None:
        """Raise `Stopped` when any rank is asked to; the weights are the last step's."""
        if self._largest(self._signals.wanted):
            raise Stopped(f"stopped: {self._leave()}")

    def within_phase(self) -> None:
        """Raise `Stopped` as `between_phases`, where no other rank waits for this one."""
        if self._alone:
            self.between_phases()

    def _largest(self, value: float) -> float:
        return float(self._reduce_max(np.array([value], np.float32))[0])

    def finish(self) -> None:
        """Return when the last checkpoint is complete."""
        self._store.wait()

    def _leave(self) -> str:
        """Save the state of the last step, and say how to continue."""
        if not self._step:
            return "before the first step was done, so there is nothing to save; start again with the same command."
        if self._saved != self._step:
            self._save(False)
        self._store.wait()
        return (
            f"the state after step {self._step} of {self._total} is saved in {self._store.folder}; continue with the "
            "same command and --resume_training auto."
        )

    def _save(self, best: bool) -> None:
        state = self._state
        with self._saving():
            groups = {
                kind: ShardGroup(layout, backend.read_all(parameters))
                for kind, (layout, parameters) in state.arrays.items()
            }
            self._check_finite(groups)
            files = {f"{HF_FOLDER}/{name}": content for name, content in state.hf_files.items()}
            files |= {name: state.blobs[name].encode(kept) for name, kept in self._blob_snapshots.items()}
            self._store.save(TrainingState(self._step, groups, self._counts, state.run, files), best)
            self._saved = self._step

    def _check_finite(self, groups: Mapping[str, ShardGroup]) -> None:
        """Raise `UserError` for bad weights, which would push good checkpoints out."""
        for kind in (WEIGHTS, CRITIC_WEIGHTS, REFERENCE_WEIGHTS):
            if kind in groups:
                group = groups[kind]
                name = first_not_finite(group.shards, group.layout.placements, self._reduce_max)
                if name:
                    self._store.wait()
                    raise self._store.with_advice(UserError(f"step {self._step}: {spoiled(kind, name)}"))

    def _take_snapshot(self) -> None:
        """Copy everything but the arrays: the next step may be left half-way."""
        self._counts = {name: counter.state_dict() for name, counter in self._counters.items()}
        self._blob_snapshots = {name: blob.snapshot() for name, blob in self._state.blobs.items()}


@dataclass
class Best:
    """Best value of one metric so far; mode: max or min."""

    metric: str | None
    mode: str
    value: float | None = None
    step: int | None = None

    def improved(self, metrics: Mapping[str, float], step: int) -> bool:
        """Test that this step is the best so far. UserError without such a metric."""
        name = self.metric
        validated = any(other.startswith("val-") for other in metrics)
        if name is None or (name not in metrics and name.startswith("val-") and not validated):
            return False
        if name not in metrics:
            near = nearest(name, metrics, cutoff=0.4)
            hint = f"did you mean {near}?" if near else f"this step has {', '.join(sorted(metrics))}."
            raise UserError(f"trainer.save_best_metric is {name}, and there is no such metric; {hint}")
        sign, value = 1 if self.mode == "max" else -1, metrics[name]
        better = isfinite(value) and (self.value is None or sign * value > sign * self.value)
        if better:
            self.value, self.step = value, step
        return better

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; values of another metric are forgotten."""
        if state["metric"] == self.metric:
            self.value, self.step = state["value"], state["step"]


@dataclass
class BadUpdates:
    """Number of consecutive updates skipped for a non-finite loss or gradient."""

    in_row: int = 0

    def count(self, updates: Sequence[Update]) -> int:
        """Count the longest run of skipped updates, earlier steps included."""
        most = 0
        for update in updates:
            self.in_row = self.in_row + 1 if update.result.failed else 0
            most = max(most, self.in_row)
        return most

    def state_dict(self) -> dict[str, Any]:
        return {"in_row": self.in_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.in_row = state["in_row"]
