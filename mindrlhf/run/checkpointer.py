"""Keeps a run: saves its state when that is due, and ends it in good order when it has to stop before its last step."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from typing import Any, Protocol

import numpy as np

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.finite import spoiled
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
from mindrlhf.job import Job
from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.partition import Partition
from mindrlhf.roles.critic import Critic
from mindrlhf.roles.part import Side
from mindrlhf.roles.weights import Parameters
from mindrlhf.run.stop import Agreement, Stopped
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.updater import Update


class Stateful(Protocol):
    """What has numbers of its own that a resumed run needs: the prompt stream, the optimizer, ..."""

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from them."""


class Bulky(Protocol):
    """What has more than a few numbers: encoded only when it is saved."""

    def snapshot(self) -> Any:
        """What will not change any more."""

    def encode(self, snapshot: Any) -> bytes:
        """A snapshot as bytes."""

    def decode(self, content: bytes) -> None:
        """Go on from them."""


class Keeper:
    """Used by every rank at the same places.

    groups: kind -> its layout, and this rank's parameters of it by the names of the layout.
    counters, bulk: name -> what has state. run: see `TrainingState`; hf: the files of its HF folder, on rank 0.
    timer: measures what saving costs the training, and has the arrays in memory. settle: returns when what is written
    beside the training is there; a checkpoint vouches for it.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        total_steps: int,
        store: CheckpointStore,
        agreement: Agreement,
        groups: Mapping[str, tuple[Layout, Parameters]],
        counters: Mapping[str, Stateful],
        bulk: Mapping[str, Bulky],
        run: Mapping[str, Any],
        hf: Mapping[str, bytes],
        timer: Callable[[], AbstractContextManager],
        settle: Callable[[], None],
    ):
        self._settings, self._total, self._store, self._agreement = settings, total_steps, store, agreement
        self._groups, self._bulk, self._run, self._hf = groups, bulk, run, hf
        self._timer, self._settle = timer, settle
        self._best, self._bad = Best(settings.save_best_metric, settings.save_best_mode), BadUpdates()
        self._stateful = {**counters, "best": self._best, "bad_updates": self._bad}
        self._step, self._saved = 0, None  # steps done; the step of the last checkpoint
        self._snapshot()

    @property
    def first_step(self) -> int:
        """The step to begin with."""
        return self._step + 1

    def restore(self, checkpoint: Checkpoint, rank: int) -> None:
        """Go on from a checkpoint, in whatever layout it was written; the weights have been read already.

        What the settings have added since it was written begins anew.
        """
        for kind, (layout, parameters) in self._groups.items():
            if kind not in (WEIGHTS, CRITIC_WEIGHTS) and kind in checkpoint.groups:
                read = checkpoint.reader(kind, layout, rank)
                for name, parameter in parameters.items():
                    backend.write(parameter, read(name))
        for name, stateful in self._stateful.items():
            if name in checkpoint.counters:
                with checkpoint.understood(f"counters.{name}"):
                    check_alike(checkpoint.counters[name], stateful.state_dict())
                    stateful.load_state_dict(checkpoint.counters[name])
        for name, bulky in self._bulk.items():
            content = checkpoint.companion(name)
            if content is not None:
                with checkpoint.understood(f"the file {name}"):
                    bulky.decode(content)
        self._step = self._saved = checkpoint.step
        self._store.best_step = self._best.step
        self._snapshot()

    def after_step(self, step: int, metrics: Mapping[str, float], updates: Sequence[Update]) -> None:
        """The step is done and its metrics are written: save if it is due.

        Raises `Stopped` when the run is asked to stop, `UserError` when it cannot go on; its state is saved then.
        """
        self._store.check()
        bad = self._bad.count(updates)
        best = self._best.improved(metrics, step)
        self._step = step
        self._snapshot()
        frequency = self._settings.save_freq
        if best or (frequency and (step % frequency == 0 or step == self._total)):
            self._save(best)
        if bad >= self._settings.max_bad_updates:
            raise UserError(
                f"step {step}: {bad} updates in a row were skipped because a loss or gradient was not finite; lower "
                f"optimizer.lr or look at the samples that were named, {self._leave()}"
            )
        used = self._agreement.memory()
        if used is not None:
            raise UserError(
                f"step {step}: a process uses {used:.1f} GiB, and trainer.max_host_memory_gb is "
                f"{self._settings.max_host_memory_gb:g}; free memory or raise the limit, {self._leave()}"
            )
        if step < self._total:
            self.between_phases()

    def between_phases(self) -> None:
        """Raises `Stopped` when any rank is asked to stop; the weights are still those of the last step's end."""
        if self._agreement.stop():
            raise Stopped(f"stopped: {self._leave()}")

    def within_phase(self) -> None:
        """As `between_phases`, where no other rank waits for this one."""
        if self._agreement.stop_now():
            raise Stopped(f"stopped: {self._leave()}")

    def finish(self) -> None:
        """Return when the last checkpoint is complete."""
        self._store.wait()

    def _leave(self) -> str:
        """Save what there is, and say how to continue."""
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
        with self._timer():
            self._settle()
            groups = {
                kind: ShardGroup(layout, backend.read_all(parameters))
                for kind, (layout, parameters) in self._groups.items()
            }
            self._check_finite(groups)
            files = {f"{HF_FOLDER}/{name}": content for name, content in self._hf.items()}
            files |= {name: self._bulk[name].encode(kept) for name, kept in self._kept.items()}
            self._store.save(TrainingState(self._step, groups, self._counters, self._run, files), best)
            self._saved = self._step

    def _check_finite(self, groups: Mapping[str, ShardGroup]) -> None:
        """Raises `UserError` on all ranks where weights are spoiled, so that they push no good ones out."""
        for kind in (WEIGHTS, CRITIC_WEIGHTS, REFERENCE_WEIGHTS):
            name = self._agreement.first_not_finite(groups[kind]) if kind in groups else None
            if name:
                self._store.wait()
                raise self._store.with_advice(UserError(f"step {self._step}: {spoiled(kind, name)}"))

    def _snapshot(self) -> None:
        """Note everything but the arrays as it is after a step: the next one may be left half-way."""
        self._counters = {name: stateful.state_dict() for name, stateful in self._stateful.items()}
        self._kept = {name: bulky.snapshot() for name, bulky in self._bulk.items()}


class Best:
    """The best value of one metric so far. metric: None for no such thing; mode: max or min."""

    def __init__(self, metric: str | None, mode: str):
        self._metric, self._sign = metric, {"max": 1.0, "min": -1.0}[mode]
        self._value: float | None = None
        self.step: int | None = None

    def improved(self, metrics: Mapping[str, float], step: int) -> bool:
        """Whether this step is the best one so far. Raises `UserError` when there is no metric of that name."""
        name = self._metric
        if name is None or (name not in metrics and name.startswith("val-") and not any_validation(metrics)):
            return False
        if name not in metrics:
            near = get_close_matches(name, metrics, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"this step has {', '.join(sorted(metrics))}."
            raise UserError(f"trainer.save_best_metric is {name}, and there is no such metric; {hint}")
        value = metrics[name]
        better = self._value is None or self._sign * value > self._sign * self._value
        if better and np.isfinite(value):
            self._value, self.step = value, step
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self._metric, "value": self._value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Values of another metric are forgotten."""
        if state["metric"] == self._metric:
            self._value, self.step = state["value"], state["step"]


class BadUpdates:
    """How many updates in a row have been skipped because something was not finite."""

    def __init__(self) -> None:
        self._in_row = 0

    def count(self, updates: Sequence[Update]) -> int:
        """The most in a row that these updates make, those before them included."""
        most = 0
        for update in updates:
            self._in_row = self._in_row + 1 if update.result.failed else 0
            most = max(most, self._in_row)
        return most

    def state_dict(self) -> dict[str, Any]:
        return {"in_row": self._in_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._in_row = state["in_row"]


def any_validation(metrics: Mapping[str, float]) -> bool:
    """Whether the step measured accuracy."""
    return any(name.startswith("val-") for name in metrics)


def open_store(job: Job, collectives: Collectives) -> CheckpointStore:
    """Where the run's checkpoints go; opened by all ranks at the same time."""
    settings, world = job.config.trainer, collectives.world
    token = collectives.broadcast_object(secrets.token_hex(4), root=0)
    folder, keep = job.args.save_ckpt_dir, settings.save_max_ckpt_num
    return CheckpointStore(folder, world.rank, world.size, token, keep, settings.async_save)


def arrays_of(
    training: Side, policy: Parameters, optimizer: AdamW, critic: Critic | None, reference: Parameters | None
) -> dict[str, tuple[Layout, Parameters]]:
    """Everything of a rank that training changes. reference: where it follows the policy, else None."""
    part = training.partition
    groups = {WEIGHTS: (part.layout, policy), **_moments("", part, optimizer)}
    if critic:
        groups[CRITIC_WEIGHTS] = (critic.side.partition.layout, critic.parameters)
        groups |= _moments("critic_", critic.side.partition, critic.optimizer)
    if reference:
        groups[REFERENCE_WEIGHTS] = (part.layout, reference)
    return groups


def _moments(prefix: str, part: Partition, optimizer: AdamW) -> dict[str, tuple[Layout, Parameters]]:
    names = [spec.name for spec in part.specs]
    return {
        f"{prefix}{kind}": (part.optimizer_layout, dict(zip(names, moments, strict=True)))
        for kind, moments in (("exp_avg", optimizer.first), ("exp_avg_sq", optimizer.second))
    }


def present(**parts: Any) -> dict[str, Any]:
    """Those that there are."""
    return {name: part for name, part in parts.items() if part is not None}
