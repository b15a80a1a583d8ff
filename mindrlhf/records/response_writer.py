"""Every response of a run, kept as text and for `--replay` while the next step is at work."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from mindrlhf.files.json import json_lines
from mindrlhf.records.rollout_dump import rollout_rows, write_rollouts
from mindrlhf.records.rollout_parts import RolloutParts
from mindrlhf.records.rollout_record import to_columns
from mindrlhf.types import Experience


def _step_back() -> None:
    """Lets the threads that compute go first, where the system knows of such."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class KeptResponses:
    """On rank 0. A thread turns a step's responses into text and files: MindSpore lets other threads run while it
    computes. It begins a little later, when the next step is computing: of two threads that both run Python, each waits
    for the other.

    folder: where a JSONL of each step goes (`records.rollout_dump`), or None. record: what becomes their MindRecord
    when the run ends, or None. decode: token ids -> text.
    """

    HEAD_START = 0.03  # seconds

    def __init__(self, folder: Path | None, record: RolloutParts | None, decode: Callable[[np.ndarray], str]):
        self._folder, self._record, self._decode = folder, record, decode
        self._thread = ThreadPoolExecutor(1, "kept-responses", _step_back)
        self._begun: Future | None = None
        self._awaited = threading.Event()

    def add(self, step: int, experiences: Sequence[Experience]) -> None:
        """Begins to keep a step's responses, in this order; those of the step before are in files by then."""
        self.settle()
        self._awaited.clear()
        self._begun = self._thread.submit(self._write, step, experiences)

    def settle(self) -> None:
        """Returns when all that was added is in files; raises what stood in the way, `UserError` for a full disk."""
        begun, self._begun = self._begun, None
        self._awaited.set()
        if begun:
            begun.result()

    def close(self, finished: bool) -> None:
        """Puts the record together. finished: the run has done its last step."""
        try:
            self.settle()
        finally:
            self._thread.shutdown()
        if self._record:
            self._record.merge(finished)

    def _write(self, step: int, experiences: Sequence[Experience]) -> None:
        self._awaited.wait(self.HEAD_START)
        if self._folder:
            write_rollouts(self._folder, step, json_lines(rollout_rows(step, experiences, self._decode)))
        if self._record:
            self._record.add(step, to_columns(step, experiences))
