"""Writer of a run's responses while it trains: JSONL, and parts of a MindRecord.

When the run ends, the MindRecord is put together from one part per step: a killed run loses none of the steps before
its last checkpoint, and memory does not grow with the run.
"""

import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, clean
from mindrlhf.files.naming import image_path, step_files, step_path
from mindrlhf.records.formats import pack, read_record_rows, unpack, write_record, write_text
from mindrlhf.records.rows import Row, rows_of
from mindrlhf.types import Experience

START_DELAY_S = 0.03
PART = ".npz"


class RecordParts:
    """Parts by step in `FILE.parts`, which become the MindRecord `FILE`."""

    def __init__(self, file: Path, steps_done: int = 0):
        """Keep the parts of the first `steps_done` steps, also from the MindRecord."""
        self.file = Path(file)
        self.folder = parts_folder(self.file)
        clean(self.folder)
        try:
            for step, path in self._parts().items():
                if step > steps_done:
                    path.unlink()
        except OSError as error:
            raise UserError(f"{error.filename}: cannot be removed ({error.strerror}).") from error
        if steps_done and self.file.is_file():
            self._take_from_record(steps_done)
        self.missing = [step for step in range(1, steps_done + 1) if step not in self._parts()]

    def add(self, step: int, rows: Sequence[Row]) -> None:
        """Keep a step's rows; they are in a file when this returns."""
        with atomic_file(step_path(self.folder, step, PART), durable=False) as temporary:
            temporary.write_bytes(pack(rows))

    def merge(self, finished: bool) -> None:
        """Write the MindRecord of all steps; finished: then remove its parts."""
        if parts := self._parts():
            write_record(self.file, chain.from_iterable(map(_read, parts.values())))
        if finished:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _parts(self) -> dict[int, Path]:
        return step_files(self.folder, PART)

    def _take_from_record(self, steps_done: int) -> None:
        have = self._parts()
        if len(have) < steps_done:
            for step, rows in groupby(read_record_rows(self.file), lambda row: row["step"]):
                if step <= steps_done and step not in have:
                    self.add(step, list(rows))


def parts_folder(file: Path) -> Path:
    """Name the folder of a MindRecord's parts."""
    return file.with_name(f"{file.name}.parts")


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return unpack(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove it, and its step is left out.") from error


def _lower_priority() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class ResponseWriter:
    """Writer of a run's responses, on rank 0, in a thread.

    The thread starts after a short delay, once the next step runs inside MindSpore and Python's lock is free. folder:
    for the JSONL of each step, or None. record: the parts of the MindRecord, or None. decode: token ids -> text.
    """

    def __init__(self, folder: Path | None, record: RecordParts | None, decode: Callable[[np.ndarray], str]):
        self._folder = folder
        self._record = record
        self._decode = decode
        self._thread = ThreadPoolExecutor(1, "responses", _lower_priority)
        self._begun: Future | None = None
        self._awaited = threading.Event()

    def add(self, step: int, experiences: Sequence[Experience]) -> None:
        """Begin to write a step's responses after the last step's are in files."""
        self.flush()
        self._awaited.clear()
        self._begun = self._thread.submit(self._write, step, experiences)

    def flush(self) -> None:
        """Block any calling thread until responses are in files.

        Raises the writer's error, at every call: no checkpoint may imply a step whose responses are lost.
        """
        begun = self._begun
        self._awaited.set()
        if begun:
            begun.result()

    def close(self, finished: bool) -> None:
        """Put the record together, unless a step's responses are lost.

        finished: the run has done its last step.
        """
        try:
            self.flush()
        finally:
            self._thread.shutdown()
        if self._record:
            self._record.merge(finished)

    def _show(self, experiences: Sequence[Experience]) -> None:
        """Write the pictures of prompts and responses, each once."""
        groups = [experience.group for experience in experiences]
        shown = [group.prompt.pictures for group in groups]
        shown += [tuple(rollout.pictures.values()) for group in groups for rollout in group.rollouts]
        for name, picture in {one.name: one for part in shown for one in part}.items():
            path = image_path(self._folder, name)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(path, durable=False) as temporary:
                    temporary.write_bytes(picture.png())

    def _write(self, step: int, experiences: Sequence[Experience]) -> None:
        self._awaited.wait(START_DELAY_S)
        rows = list(rows_of(step, experiences, self._decode if self._folder else None))
        if self._folder:
            self._show(experiences)
            write_text(self._folder, step, rows)
        if self._record:
            self._record.add(step, rows)
