"""One console line per step that shows learning and speed."""

import math
import re
import shutil
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from mindrlhf.files.printable import printable

REWARD, LOSS = "critic/rewards/mean", "train/loss"
GUIDES = (REWARD, LOSS)  # metric that a run improves: GRPO's, and fine-tuning's
ACCURACY = re.compile(r"val-core/(.+)/acc/mean@\d+")
HELD_OUT = {"val/loss", "accuracy"}  # columns of measurements that not every step has
FUNCTION = re.compile(r"reward/(.+)/mean")
TREND_STEPS = 10  # steps at either end of the run that the trend compares, at most
ETA_STEPS = 20  # recent steps whose times the estimate of the remaining time uses
FORECAST_STEPS = 3  # the first step of a run whose own times count more than a forecast
WIDEST = 100  # characters of a line
HEADER_EVERY = 20  # lines
SIZES = ((1e6, 1e6, 1, "M"), (1e3, 1e3, 1, "k"), (100, 1, 0, ""), (10, 1, 1, ""), (0.1, 1, 2, ""))  # from, unit, digits
# Seconds below which two units are used; their letters, seconds of the small unit, small units in a large one.
TIMES = ((3600, "ms", 1, 60), (48 * 3600, "hm", 60, 60), (math.inf, "dh", 3600, 24))


def short_number(value: float) -> str:
    """Format about three digits: 0.43, 23.1, 3.2k, 1.5M, 2.1e-06."""
    size = abs(value)
    if not math.isfinite(value):
        return str(value)
    if size >= 1e9 or 0 < size < 1e-3:
        return f"{value:.1e}"
    for least, unit, digits, name in SIZES:
        if size >= least:
            return f"{value / unit:.{digits}f}{name}"
    return f"{value:.4f}" if size else "0"


def short_duration(seconds: float) -> str:
    """Format seconds: 0.4s, 12s, 3m12s, 1h02m, 4d03h."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    _, (large, small), unit, parts = next(time for time in TIMES if whole < time[0])
    return f"{whole // unit // parts}{large}{whole // unit % parts:02d}{small}"


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Compute the means of the first and the last steps, at most 10."""
    window = max(1, min(TREND_STEPS, len(values) // 2))
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:])


def trend(values: Sequence[float]) -> float | None:
    """Compute the growth between the `ends` without NaN; None for under two values."""
    known = [value for value in values if not math.isnan(value)]
    if len(known) < 2:
        return None
    first, last = ends(known)
    return last - first


def guide(values: Mapping[str, float]) -> float | None:
    """Find the value that the run improves: mean reward, or loss."""
    return next((values[name] for name in GUIDES if name in values), None)


def console_width() -> int:
    """Compute the characters of a line: the terminal's width, but at most 100."""
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 0)).columns)


def _number(value: float) -> tuple[str, ...]:
    return short_number(value), f"{value:.0e}"


def _signed(value: float) -> tuple[str, ...]:
    return f"{value:+.2f}", f"{value:+.0e}"


def _share(value: float) -> tuple[str, ...]:
    return f"{value:.0%}", f"{value:.0e}"


def _seconds(value: float) -> tuple[str, ...]:
    return (short_duration(value),)


@dataclass(frozen=True)
class Column:
    """Column of the console line.

    importance: a narrow line has the columns with the smallest numbers. metric: of a step, or a name of
    `ConsoleWriter._known`. texts: formats a value in several forms; the first that fits is shown.
    """

    title: str
    width: int
    importance: int
    metric: str
    texts: Callable[[float], tuple[str, ...]] = _number

    def cell(self, values: Mapping[str, float | None]) -> str:
        """Format a step's value, with a dash for none."""
        value = values.get(self.metric)
        texts = ("-",) if value is None else self.texts(value)
        return next((text for text in texts if len(text) <= self.width), "*" * self.width).rjust(self.width)


COLUMNS = (  # in the order of the line
    Column("reward", 7, 0, REWARD),
    Column("loss", 7, 0, LOSS),
    Column("trend", 6, 1, "trend", _signed),
    Column("val loss", 8, 4, "val/loss"),
    Column("accuracy", 8, 4, "accuracy", lambda value: (f"{value:.3f}", f"{value:.0e}")),
    Column("entropy", 7, 5, "actor/entropy"),
    Column("kl", 7, 9, "actor/kl_loss"),
    Column("mismatch", 8, 8, "mismatch"),
    Column("length", 6, 6, "response_length/mean"),
    Column("cut", 4, 7, "response_length/clip_ratio", _share),
    Column("same", 4, 10, "group/zero_std_fraction", _share),
    Column("calls", 5, 11, "tools/call_frequency"),
    Column("failed", 6, 12, "tools/failure_frequency", _share),
    Column("grad", 7, 15, "actor/grad_norm"),
    Column("time", 6, 3, "time", _seconds),
    Column("gen", 6, 13, "timing_s/gen", _seconds),
    Column("train", 6, 14, "timing_s/update_actor", _seconds),
    Column("tok/s", 6, 8, "throughput"),
    Column("left", 6, 2, "left", _seconds),
)
MISMATCH = "rollout_corr/k3_kl"
ROUNDING = 1e-8  # nats per token of the mismatch; with float32 on both sides it is less
LEAST_IMPORTANT = 100  # each reward function's mean, if there are several


class ConsoleWriter:
    """Writer of one line per step to the console, in columns.

    A header names the columns every 20 lines: columns with values so far, as many as fit into the terminal. Times,
    tokens per second and the time left exclude seconds of compiling. The time left follows a forecast until the third
    step, then the median of recent steps, the first one excepted.
    """

    def __init__(
        self,
        total_steps: int,
        earlier: Sequence[float] = (),
        every: int = 1,
        stream: TextIO | None = None,
        forecast_s: float | None = None,
    ) -> None:
        """Begin with the `guide` of earlier steps.

        every: steps between two lines; the first, the last, and steps with held-out data always have a line. stream:
        standard output by default. forecast_s: seconds of a step, if known.
        """
        self._total_steps = total_steps
        self._every = every
        self._stream = stream
        self._forecast_s = forecast_s
        self._guides = list(earlier)
        self._seen = set()
        self._steps = 0
        self._step_s = deque[float](maxlen=ETA_STEPS)
        self._header = ""
        self._lines = 0
        self._functions = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        first = not self._steps
        known = self._known(step, values)
        self._seen |= known.keys()
        due = first or step % self._every == 0 or step == self._total_steps or HELD_OUT & known.keys()
        if not due:
            return
        label = f"{step}/{self._total_steps}".rjust(2 * len(str(self._total_steps)) + 1)
        columns = self._columns(console_width() - len(label))
        header = "  ".join(["step".rjust(len(label)), *(column.title.rjust(column.width) for column in columns)])
        if header != self._header or self._lines % HEADER_EVERY == 0:
            self._header = header
            self._lines = 0
            self._print(header)
        self._lines += 1
        self._print("  ".join([label, *(column.cell(known) for column in columns)]))
        if first and values.get("timing_s/compile", 0.0) >= 0.1:
            self._print(f"graphs were compiled for {short_duration(values['timing_s/compile'])}, in no column above")

    def close(self) -> None:
        """Do nothing: every line is out when `write` returns."""

    def _print(self, line: str) -> None:
        print(printable(line), file=self._stream or sys.stdout, flush=True)  # reward functions name their columns

    def _columns(self, room: int) -> list[Column]:
        """Choose columns for this many characters."""
        several = self._functions.values() if len(self._functions) > 1 else ()
        offered = [column for column in (*COLUMNS, *several) if column.metric in self._seen]
        chosen = []
        for column in sorted(offered, key=lambda column: column.importance):
            if 2 + column.width <= room:
                room -= 2 + column.width
                chosen.append(column)
        return [column for column in offered if column in chosen]

    def _known(self, step: int, values: Mapping[str, float]) -> dict[str, float | None]:
        """Add derived values to a step's metrics: trend, mismatch, accuracy, time, throughput, left."""
        known = dict(values)
        value = guide(values)
        if value is not None:
            self._guides.append(value)
            known["trend"] = trend(self._guides)
        if values.get(MISMATCH, 0.0) > ROUNDING:
            known["mismatch"] = values[MISMATCH]
        accuracies = [value for name, value in values.items() if ACCURACY.fullmatch(name)]
        if accuracies:
            known["accuracy"] = statistics.fmean(accuracies)
        for name in values:
            if found := FUNCTION.fullmatch(name):
                title = found[1][:10]
                self._functions[name] = Column(title, max(7, len(title)), LEAST_IMPORTANT, name)
        if "timing_s/step" in values:
            known |= self._times(step, values)
        return known

    def _times(self, step: int, values: Mapping[str, float]) -> dict[str, float | None]:
        whole = values["timing_s/step"]
        compiling = values.get("timing_s/compile", 0.0)
        times: dict[str, float | None] = {"time": whole - compiling}
        if self._steps:  # the first has work of its own: files read for the first time, memory taken
            self._step_s.append(whole - compiling)
        self._steps += 1
        seconds = statistics.median(self._step_s) if self._step_s else None
        if self._steps < FORECAST_STEPS and self._forecast_s is not None:
            seconds = self._forecast_s
        more = self._total_steps - step
        times["left"] = None if more and seconds is None else more * (seconds or 0.0)
        if "perf/throughput" in values and whole > compiling:
            times["throughput"] = values["perf/throughput"] * whole / (whole - compiling)
        return times
