"""Life of a run: phases, metrics, responses, checkpoints, and its end."""

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.compile.graph import announced, compile_seconds
from mindrlhf.backend.device import Device
from mindrlhf.backend.memory import open_store
from mindrlhf.checkpoint.hf import companion_files, generation_defaults
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.store import CheckpointStore
from mindrlhf.checkpoint.tokenizer import stopping_config
from mindrlhf.checkpoint.weights import Weights, hf_folder
from mindrlhf.configs.grpo import MemorySettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency, moving_roles
from mindrlhf.metrics.progress import CompileLines, Progress
from mindrlhf.metrics.timer import STEP, Timers
from mindrlhf.metrics.writers import METRICS_FILE
from mindrlhf.model_roles import POLICY, RoleModel
from mindrlhf.phases import PHASES
from mindrlhf.roles.parts import Parts
from mindrlhf.run.checkpointer import Blob, Checkpointer, Managed, Stateful
from mindrlhf.run.identity import check_identity, find_checkpoint, run_identity
from mindrlhf.run.outputs import clean_outputs
from mindrlhf.run.report import Report, RunData, StepRecord
from mindrlhf.run.stop_signals import StopSignals

_log = logging.getLogger(__name__)

Validation = Callable[[int], Mapping[str, float]]
"""Measurement on held-out data after a step: returns metrics, the same on all ranks."""


class Run:
    """Life of a run on one rank, from `checkpoint` if there is one.

    report: class that reports the steps of this kind of run.
    """

    def __init__(
        self,
        job: Job,
        data: RunData,
        collectives: Collectives,
        checkpoint: Checkpoint | None,
        signals: StopSignals,
        report: type[Report],
    ):
        self._job = job
        self._data = data
        self.collectives = collectives
        self.checkpoint = checkpoint
        settings = job.config.trainer
        self.residency = open_residency(job.config.memory, job.train.context.device, job.output)
        self.timers = Timers(compile_seconds, self._enter)
        self.progress = Progress(settings.progress and collectives.is_first, compile_s=compile_seconds)
        self.report = report(job, data, collectives, self.timers, self.residency)
        self.total_steps = data.total_steps
        self._card = data.card(job.config, job.policy.path)
        token = collectives.broadcast_object(secrets.token_hex(4), root=collectives.ranks[0])
        folder = job.flags.save_ckpt_dir
        keep = settings.save_max_ckpt_num
        writing = {"keep": keep, "asynchronous": settings.async_save, "implied": self.report.flush}
        self._store = CheckpointStore(folder, collectives.world.rank, collectives.ranks, token, **writing)
        self.checkpointer = Checkpointer(settings, self.total_steps, self._store, signals, collectives, self._saving)

    @property
    def first_step(self) -> int:
        return self.checkpointer.first_step

    def begin(self, parts: Parts, counters: dict[str, Stateful], blobs: dict[str, Blob], stack: ExitStack) -> None:
        """Continue from the checkpoint, if any, and open the outputs, which `stack` closes.

        counters, blobs: state to save in addition to the parts' own; None entries are left out. The outputs are opened
        last, because this truncates an earlier run's files: mistakes in the input have been found by then.
        """
        job = self._job
        first = self.collectives.is_first
        parts.register(self.residency)
        counters = drop_none(parts.counters() | counters | {"report": self.report})
        files = hf_files(job.policy, job.tokenizer, self._card.files()) if first else {}
        identity = run_identity(job.config, job.roles, job.train, self._data)
        self.checkpointer.manage(Managed(parts.arrays(), counters, drop_none(blobs), identity, files))
        if self.checkpoint:
            with self.timers("load_checkpoint"):
                self.checkpointer.restore(self.checkpoint, self.collectives.world.rank)
        if first:
            self.report.open_outputs(self.first_step - 1)
            if self.progress.enabled:
                stack.enter_context(announced(CompileLines()))
        stack.callback(self._store.settle)  # MindSpore frees the arrays when the process ends
        stack.push(self._close_report)

    def _close_report(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Close the outputs; an earlier error keeps its place."""
        try:
            self.report.close()
        except Exception as second:
            if error is None:
                raise
            if str(second).rstrip(".") not in str(error):
                _log.warning("%s", second)

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps, until patience runs out."""
        for step in range(self.first_step, self.total_steps + 1):
            if self.checkpointer.over:
                break
            yield step
        if (reason := self.checkpointer.early_end) and self.collectives.is_first:
            print(reason, flush=True)

    def record(self, step: int, result: Any, position: int = 0) -> StepRecord:
        """Write metrics and checkpoint of a step; the next step's time includes this.

        result: argument of the report's `write`. position: rows drawn so far.
        """
        with self.timers(STEP):
            with self.timers("report"), self._store.advising():
                self.report.write(step, result, position)
            self.checkpointer.after_step(step, self.report.last, result.updates)
        return StepRecord(step, self.total_steps, self.report.last, self.checkpointer.saved)

    def validate_first(self, validation: Validation | None) -> Iterator[StepRecord]:
        """Measure on held-out data before step 1, if the settings ask for it."""
        if validation and self._job.config.trainer.val_before_train and self.first_step == 1:
            yield self.validate_only(validation)

    def validate_only(self, validation: Validation) -> StepRecord:
        """Measure on held-out data before any further step."""
        step = self.first_step - 1
        with self.timers("testing"):
            values = validation(step)
        self.timers.collect()
        self.report.write_validation(step, values)
        return StepRecord(step, self.total_steps, values)

    def validate(self, validation: Validation | None, step: int) -> None:
        """Measure on held-out data after every `test_freq` steps and after the last step."""
        frequency = self._job.config.trainer.test_freq
        if validation and frequency and (step % frequency == 0 or step == self.total_steps):
            with self.timers("testing"):
                self.report.add_values(validation(step))

    def export(self, parts: Parts) -> None:
        """Write the trained or best models as HF directories; the run is finished then."""
        job = self._job
        folder = self._job.flags.save_ckpt_dir
        if job.config.trainer.export_best:
            with self.timers("load_checkpoint"):
                self.checkpointer.load_best(self.collectives.world.rank)
        metrics = job.output / METRICS_FILE if self.collectives.is_first else None
        card = self._card.measured(self.report.last, metrics).files()
        with self.timers("export"), self._store.advising():
            first = Weights(job.policy.path, job.model, job.config.seed)
            if policy := parts.get(POLICY.name):
                policy.save_hf(folder / policy.role.folder, job.tokenizer, first, card, job.config.lora)
            for part in parts.trained():
                part.save_hf(folder / part.role.folder, job.tokenizer)
        self.report.finished = True

    def _saving(self) -> AbstractContextManager:
        return self.timers("save_checkpoint")

    def _enter(self, phase: str) -> None:
        """Prepare memory for a phase, after copying arrays that an unfinished checkpoint needs."""
        self.collectives.world.enter_phase(phase)
        if self.residency.disturbs(phase, PHASES["save_checkpoint"].groups):
            self._store.settle()
        self.residency.enter(phase)


def continued_checkpoint(job: Job, data: RunData, collectives: Collectives) -> Checkpoint | None:
    """Clean the outputs; find and check the checkpoint to continue, if any."""
    clean_outputs(collectives, job.output, job.flags.save_ckpt_dir, job.flags.save_data_file)
    checkpoint = find_checkpoint(job.config.trainer, job.flags.save_ckpt_dir, collectives)
    if checkpoint:
        run = run_identity(job.config, job.roles, job.train, data)
        check_identity(checkpoint, run, type(job.config)(), collectives.is_first)
    return checkpoint


def open_residency(settings: MemorySettings, device: Device, output: Path) -> Residency:
    """Open the residency that swaps weights at the phases of a step."""
    folder = settings.swap_dir or output / "swap"
    moving = moving_roles(settings.swap, device)
    return Residency(lambda parameters: open_store(device, parameters, folder), moving)


def hf_files(policy: RoleModel, tokenizer: Tokenizer, card: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return all files of a Hugging Face folder except the weights, for checkpoints."""
    generation = generation_defaults(policy.path and hf_folder(policy.path))
    return companion_files(stopping_config(tokenizer, policy.model), tokenizer, generation, card)


def drop_none(entries: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if entry is not None}
