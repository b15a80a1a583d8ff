"""Writers of a step's metrics: JSONL and TensorBoard files.

`Writers` sends each step to several. All get the same values. A resumed run gives the step it starts with, and the
steps of the files from that one on (written after the last checkpoint) are cut off, so that no step is there twice.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file, make_folder
from mindrlhf.files.json import is_number, json_line, json_lines, read_json_lines

MOST_STEP = 2**53  # whole numbers up to here are exact in float64; larger ones are read as that


class Writer(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step; steps only grow."""

    def close(self) -> None:
        """Finish the files; nothing is written afterwards."""


class Writers:
    """Several writers as one.

    A step that does not follow the one before is a ValueError.
    """

    def __init__(self, writers: Sequence[Writer]):
        self._writers = tuple(writers)
        self._step: int | None = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step everywhere."""
        if self._step is not None and step <= self._step:
            raise ValueError(f"step {step} after step {self._step}: each step is written once, in order")
        self._step = step
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        """Close every writer; the first error is raised at the end."""
        troubles = []
        for writer in self._writers:
            try:
                writer.close()
            except Exception as error:
                troubles.append(error)
        if troubles:
            raise troubles[0]

    def __enter__(self) -> "Writers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the steps of a metrics JSONL file, with their `step`.

    null is read back as NaN.
    """
    return [_metrics(row, f"{path}, line {number}") for number, row in enumerate(read_json_lines(path), start=1)]


def _metrics(row: Mapping[str, Any], where: str) -> dict[str, float]:
    """Parse one step of a metrics file. Raises UserError for another object."""
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or abs(step) > MOST_STEP:
        raise UserError(f"{where}: no `step` in it; give the metrics.jsonl of a run")
    values = {name: float("nan") if value is None else value for name, value in row.items()}
    for name, value in values.items():
        if not is_number(value):
            raise UserError(f"{where}: {name:.80} is {value!r:.80} where a number belongs; restore or remove that line")
    return {name: value if -MOST_STEP <= value <= MOST_STEP else float(value) for name, value in values.items()}


def _append_to(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8", newline="")
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): give a folder that can be written") from error


class JsonlWriter:
    """Writer of one JSON object a line; NaN and infinities are null.

    A line is `{"step": 12, "critic/rewards/mean": 0.43, ...}`.
    """

    def __init__(self, path: Path, start_step: int = 0):
        """Keep the lines of `path` before `start_step` and append to them.

        By default none is kept.
        """
        path = Path(path)
        earlier = read_metrics(path) if start_step and path.exists() else []
        kept = [row for row in earlier if row["step"] < start_step]
        with atomic_file(path, durable=False) as temporary:
            temporary.write_bytes(json_lines(kept))
        self._file = _append_to(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; it is in the file when this returns."""
        self._file.write(json_line({"step": step, **values}).decode())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardWriter:
    """Writer of scalars as TensorBoard event files.

    TensorBoard itself hides an earlier run's steps from `start_step` on.
    Events go straight to the file: by way of the library's `SummaryWriter` each is sent to a thread, which takes three
    times as long as writing it.
    """

    FLUSH_SECONDS = 60.0  # brings the file to the disk, which may take as long as a short step

    def __init__(self, folder: Path, start_step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        make_folder(Path(folder))
        # The suffix keeps a run that is resumed within the same second from taking over the earlier run's file.
        self._file = EventsWriter(str(Path(folder) / "events"), f".step{start_step}")
        self._file.write_event(self._event(start_step, session_log=SessionLog(status=SessionLog.START)))
        self._file.flush()
        self._flushed = time.monotonic()

    @staticmethod
    def _event(step: int, **fields: Any):
        from tensorboardX.proto.event_pb2 import Event

        return Event(wall_time=time.time(), step=step, **fields)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one event with all values of a step.

        An event for each value takes four times as long. It is in the file within a minute or a few steps.
        """
        event = self._event(step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._file.write_event(event)
        if time.monotonic() - self._flushed > self.FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Close the event file."""
        self._file.close()
