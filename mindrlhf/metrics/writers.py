"""Writers of a step's metrics, and their places in a run's output folder.

A resumed run removes its first step and all later ones from the files, so that no step is there twice.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from mindrlhf.configs.tracking import TrackingSettings
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder, writing
from mindrlhf.files.json import is_number, json_line, read_json_lines, write_json_lines
from mindrlhf.metrics.console import ConsoleWriter, guide
from mindrlhf.metrics.trackers import TrackerWriter

METRICS_FILE = "metrics.jsonl"
KINDS = ("grpo", "sft")  # of runs, and names of their folders
MOST_STEP = 2**53  # whole numbers up to here are exact in float64; larger ones are read as float64


class Writer(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step; steps only grow."""

    def close(self) -> None:
        """Finish the files; nothing is written afterwards."""


class Writers(ExitStack):
    """Several writers as one; `close` closes every one, whatever the others raise."""

    def __init__(self, writers: Iterable[Writer]):
        """Take writers as they are opened; an error of one closes its predecessors."""
        super().__init__()
        self._writers: list[Writer] = []
        self._step: int | None = None
        try:
            for writer in writers:
                self._writers.append(writer)
                self.callback(writer.close)
        except BaseException:
            self.close()
            raise

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step everywhere; ValueError unless it follows the last one."""
        if self._step is not None and step <= self._step:
            raise ValueError(f"step {step} after step {self._step}: each step is written once, in order")
        self._step = step
        for writer in self._writers:
            writer.write(step, values)


def open_writers(
    folder: Path,
    tracking: TrackingSettings,
    total_steps: int,
    start_step: int = 0,
    settings: Mapping[str, Any] | None = None,
    forecast_s: float | None = None,
) -> Writers:
    """Open the writers that are set: `metrics.jsonl`, `tensorboard/`, ... in `folder`.

    start_step: the first step of this process, from which on the files are cut off; 0 begins new files. settings: of
    the run, shown by trackers. forecast_s: seconds of a step, for the time left. UserError for a package that is not
    installed, or a folder that cannot be written; an earlier run's files are unchanged then.
    """
    folder = Path(folder)
    metrics = folder / METRICS_FILE
    earlier = [value for row in _earlier(metrics, start_step) if (value := guide(row)) is not None]
    makers = {
        "wandb": lambda: TrackerWriter("wandb", folder, tracking, settings),
        "swanlab": lambda: TrackerWriter("swanlab", folder / "swanlab", tracking, settings),
        "mlflow": lambda: TrackerWriter("mlflow", folder / "mlflow", tracking, settings),
        "trackio": lambda: TrackerWriter("trackio", folder, tracking, settings),
        "console": lambda: ConsoleWriter(total_steps, earlier, tracking.log_every, forecast_s=forecast_s),
        "tensorboard": lambda: TensorBoardWriter(folder / "tensorboard", start_step),
        "jsonl": lambda: JsonlWriter(metrics, start_step),
    }
    # Writers that can fail to open come first; writers that cut an earlier run's file come last.
    return Writers(make() for name, make in makers.items() if name in tracking.loggers)


def run_folder(path: Path) -> Path:
    """Find the output folder of a run from the folder or its metrics file."""
    return path.parent if path.name == METRICS_FILE else path


def run_labels(paths: Sequence[Path], labels: Sequence[str] | None = None) -> list[str]:
    """Name each run by its label or its folder, and number equal names."""
    names = list(labels or (run_name(path) for path in paths))
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def run_name(path: Path) -> str:
    """Name a run by its folder.

    The folder above goes before a name that is only a kind of run.
    """
    folder = run_folder(path).resolve()
    return "/".join(folder.parts[-2:]) if folder.name in KINDS else folder.name


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the steps of a metrics file, null as NaN. Raises UserError."""
    return [_metrics(row, f"{path}, line {number}") for number, row in enumerate(read_json_lines(path), start=1)]


def _metrics(row: Mapping[str, Any], where: str) -> dict[str, float]:
    step = row.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or abs(step) > MOST_STEP:
        raise UserError(f"{where}: no `step` in it; give the metrics.jsonl of a run")
    values = {name: float("nan") if value is None else value for name, value in row.items()}
    for name, value in values.items():
        if not is_number(value):
            raise UserError(f"{where}: {name:.80} is {value!r:.80} where a number belongs; restore or remove that line")
    return {name: value if -MOST_STEP <= value <= MOST_STEP else float(value) for name, value in values.items()}


def _earlier(path: Path, start_step: int) -> list[dict[str, float]]:
    rows = read_metrics(path) if start_step and path.exists() else []
    return [row for row in rows if row["step"] < start_step]


class JsonlWriter:
    """Writer of lines `{"step": 12, "critic/rewards/mean": 0.43, ...}`; NaN is null."""

    def __init__(self, path: Path, start_step: int = 0):
        """Keep the lines of `path` before `start_step` and append to them."""
        write_json_lines(path, _earlier(path, start_step), durable=False)
        self._path = path
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line; it is in the file when this returns."""
        line = memoryview(json_line({"step": step, **values}))
        with writing(self._path):
            while line:
                line = line[self._file.write(line) :]

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """Writer of TensorBoard event files, which hide an earlier run's steps from `start_step` on.

    Events go straight to the file: through the library's `SummaryWriter`, with its thread, each takes three times as
    long.
    """

    FLUSH_SECONDS = 60.0  # between two flushes to the disk; a flush may take as long as a short step

    def __init__(self, folder: Path, start_step: int = 0):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        make_folder(folder)
        self._folder = folder
        # The suffix keeps a run that is resumed within the same second from taking over the earlier run's file.
        self._event = Event
        start = SessionLog(status=SessionLog.START)
        with writing(folder):
            self._file = EventsWriter(str(folder / "events"), f".step{start_step}")
            self._file.write_event(Event(wall_time=time.time(), step=start_step, session_log=start))
            self._file.flush()
        self._flushed = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a step's values as one event; separate ones take four times as long."""
        event = self._event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        with writing(self._folder):
            self._file.write_event(event)
            if time.monotonic() - self._flushed > self.FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with writing(self._folder):
            self._file.close()
