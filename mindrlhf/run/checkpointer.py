"""Checkpoints of a run on schedule, and its clean end before the last step."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.finite import first_not_finite, spoiled
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.store import HF_FOLDER, CheckpointStore
from mindrlhf.checkpoint.stored_tensor import CodedTensor
from mindrlhf.checkpoint.training_state import ShardGroup, TrainingState, check_alike
from mindrlhf.configs.run import RunSettings
from mindrlhf.errors import UserError
from mindrlhf.files.naming import step_path
from mindrlhf.metrics.performance import resident_bytes
from mindrlhf.model_roles import SAVED, TRAINED
from mindrlhf.optimizer_state import SCALES, form_named
from mindrlhf.parallel.layout import Layout, box_of
from mindrlhf.roles.part import Arrays, Parameters
from mindrlhf.run.counters import BadUpdates, Best, Patience
from mindrlhf.run.stop_signals import Stopped, StopSignals
from mindrlhf.training.moments import write_moment
from mindrlhf.training.updater import Update
from mindrlhf.units import GIB

_log = logging.getLogger(__name__)


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

    arrays: kind -> (layout, this rank's parameters by their names in the layout; scales of codes have names of their
    own). counters, blobs: by name. run: see `TrainingState`. hf_files: files of the checkpoint's HF folder, on rank 0.
    """

    arrays: Arrays
    counters: Mapping[str, Stateful] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    hf_files: Mapping[str, bytes] = field(default_factory=dict)


class Checkpointer:
    """Saver and restorer of a run, which may also end it.

    Every rank calls it at the same points, after `manage`. saving: makes a context that is entered when a save begins
    and brings the arrays into memory.
    """

    def __init__(
        self,
        settings: RunSettings,
        total_steps: int,
        store: CheckpointStore,
        signals: StopSignals,
        collectives: Collectives,
        saving: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self._settings = settings
        self._total = total_steps
        self._store = store
        self._saving = saving
        self._signals = signals
        self._reduce_max = collectives.all_reduce_max
        self._gather = collectives.all_gather_object
        self._alone = collectives.size == 1
        signals.asking = settings.stop_signals
        metric, mode = settings.best
        self._best = Best(metric, mode)
        self._bad = BadUpdates()
        self._patience = Patience(settings.early_stop_patience)
        self._elsewhere: dict[str, ShardGroup] = {}  # kinds of arrays that only other ranks hold
        self._step = 0  # steps done
        self._saved = None  # step of the last checkpoint

    def manage(self, state: Managed) -> None:
        """Take the state that checkpoints are to hold from now on."""
        self._state = state
        layouts = {kind: layout for kind, (layout, _) in state.arrays.items()}
        every = [item for part in self._gather(layouts) for item in part.items()]
        self._elsewhere = {kind: ShardGroup(layout, {}) for kind, layout in every if kind not in layouts}
        own = {"best": self._best, "bad_updates": self._bad, "patience": self._patience}
        self._counters = {**state.counters, **own}
        self._take_snapshot()

    @property
    def first_step(self) -> int:
        return self._step + 1

    @property
    def saved(self) -> Path | None:
        """Checkpoint of the last step, if it has one."""
        return step_path(self._store.folder, self._step) if self._saved == self._step else None

    def restore(self, checkpoint: Checkpoint, rank: int) -> None:
        """Restore a checkpoint in any layout, without weights; state it lacks begins fresh."""
        trained = {role.checkpoint for role in TRAINED}  # their weights are read when parts are opened
        other = None
        for kind, (layout, parameters) in self._state.arrays.items():
            if kind not in trained and kind in checkpoint.groups:
                other = _read_into(parameters, layout, checkpoint, kind, rank) or other
        if other and rank == min(layout.ranks):
            _log.warning("%s: %s.", checkpoint.folder, other)
        for name in self._counters:
            self._restore_counter(checkpoint, name)
        for name, blob in self._state.blobs.items():
            content = checkpoint.companion(name)
            if content is not None:
                with checkpoint.understood(f"the file {name}"):
                    blob.decode(content)
        self._step = self._saved = checkpoint.step
        self._store.best_step = self._best.step
        self._take_snapshot()

    def _restore_counter(self, checkpoint: Checkpoint, name: str) -> None:
        """Restore a counter; one that the checkpoint lacks stays as it is."""
        if name in checkpoint.counters:
            with checkpoint.understood(f"counters.{name}"):
                check_alike(checkpoint.counters[name], self._counters[name].state_dict())
                self._counters[name].load_state_dict(checkpoint.counters[name])

    def load_best(self, rank: int) -> None:
        """Read the best step's weights and report, unless it is the last step.

        Raises `UserError` if its checkpoint is missing.
        """
        if self._best.step in (None, self._step):
            return
        checkpoint = Checkpoint.open(step_path(self._store.folder, self._best.step))
        for kind in (role.checkpoint for role in TRAINED):
            if kind in self._state.arrays:
                layout, parameters = self._state.arrays[kind]
                _read_into(parameters, layout, checkpoint, kind, rank)
        self._restore_counter(checkpoint, "report")

    def after_step(self, step: int, metrics: Mapping[str, float], updates: Sequence[Update]) -> None:
        """Save a checkpoint if one is due.

        Raises `UserError` when the run cannot continue, after its state has been saved.
        """
        self._store.check()
        bad = int(self._largest(self._bad.count(updates)))
        best = self._best.improved(metrics, step)
        if self._best.metric in metrics:
            self._patience.count(best)
        self._step = step
        self._take_snapshot()
        if best or (self._settings.save_freq and (step % self._settings.save_freq == 0 or self.over)):
            self._save(best)
        if bad >= self._settings.max_bad_updates:
            raise UserError(
                f"step {step}: {bad} updates in a row were skipped because a loss or gradient was not finite; lower "
                f"optimizer.lr or look at the samples that were named, {self.leave()}"
            )
        limit = self._settings.max_host_memory_gb
        used = 0.0 if limit is None else self._largest(resident_bytes() / GIB)
        if limit is not None and used > limit:
            raise UserError(
                f"step {step}: a process uses {used:.1f} GiB, and trainer.max_host_memory_gb is {limit:g}; free memory "
                f"or raise the limit, {self.leave()}"
            )

    def between_phases(self) -> None:
        """Raise `Stopped` if any rank is asked to stop.

        Call it while the weights are the last step's. After the run's last step nothing is left to stop.
        """
        if not self.over and self._largest(self._signals.wanted):
            raise Stopped(f"stopped: {self.leave()}")

    @property
    def over(self) -> bool:
        """True after the last step, or when patience has run out."""
        return self._step >= self._total or self._patience.over

    @property
    def early_end(self) -> str | None:
        """Reason for an end before the last step, for people; else None."""
        if not self._patience.over or self._step >= self._total:
            return None
        best = self._best
        measured = f"{self._patience.in_row} measurements"
        found = f"{best.metric} was best in step {best.step} ({best.value:.6g})" if best.step else "no finite value"
        return f"early stop after step {self._step} of {self._total}: {measured} without a better one; {found}"

    def within_phase(self) -> None:
        """Raise `Stopped` like `between_phases`, if no other rank waits for this one."""
        if self._alone:
            self.between_phases()

    def _largest(self, value: float) -> float:
        return float(self._reduce_max(np.array([value], np.float32))[0])

    def finish(self) -> None:
        """Wait until the last checkpoint is complete."""
        self._store.wait()

    def leave(self) -> str:
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
            groups |= self._elsewhere
            files = {f"{HF_FOLDER}/{name}": content for name, content in state.hf_files.items()}
            files |= {name: state.blobs[name].encode(kept) for name, kept in self._blob_snapshots.items()}
            counts: dict[str, Any] = {}
            for own in reversed(self._gather(self._counts)):  # a part may be on other ranks than the first
                counts |= own
            self._store.save(TrainingState(self._step, groups, counts, state.run, files), best)
            self._saved = self._step

    def _check_finite(self, groups: Mapping[str, ShardGroup]) -> None:
        """Raise `UserError` for non-finite weights, which would displace good checkpoints."""
        for kind in (role.checkpoint for role in SAVED):
            if kind in groups:
                layout = groups[kind].layout
                reduce_max = partial(self._reduce_max, group=layout.ranks)
                name = first_not_finite(groups[kind].shards, layout.placements, reduce_max)
                if name:
                    self._store.wait()
                    raise self._store.with_advice(UserError(f"step {self._step}: {spoiled(kind, name)}"))

    def _take_snapshot(self) -> None:
        """Copy everything except the arrays: the next step may stop half-way."""
        self._counts = {name: counter.state_dict() for name, counter in self._counters.items()}
        self._blob_snapshots = {name: blob.snapshot() for name, blob in self._state.blobs.items()}


def _read_into(parameters: Parameters, layout: Layout, checkpoint: Checkpoint, kind: str, rank: int) -> str | None:
    """Read a rank's part of one kind of arrays, saved in any layout.

    Returns a sentence about moments that were saved in another form.
    """
    other = None
    stored = checkpoint.weights(kind, layout.shapes)
    for name in (name for name in parameters if name in layout.placements):
        part = layout.slices(rank, name)
        scales = parameters.get(f"{name}{SCALES}")
        tensor = stored.parts[name].get(box_of(part))
        if scales is not None and isinstance(tensor, CodedTensor):  # the same blocks
            backend.write(parameters[name], tensor.codes())
            backend.write(scales, tensor.scales.read())
        else:
            write_moment(parameters[name], scales, stored.read(name, part))
        own, theirs = form_named(str(backend.dtype_of(parameters[name]))), form_named(stored.dtypes[name])
        if own != theirs:
            other = f"its moments are {theirs}, and optimizer.state is {own}: they are converted"
    return other
