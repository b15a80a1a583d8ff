"""Progress inside a phase: a terminal bar, or occasional lines in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TextIO, TypeVar

from mindrlhf.metrics.console import short_duration, short_number

Item = TypeVar("Item")
INTERVAL = 5.0  # seconds between two lines


class Advance(Protocol):
    def __call__(self, count: int, total: int | None = None) -> None:
        """Count more units; total: the total number of units, if it has changed."""


@dataclass(frozen=True)
class Progress:
    """Progress of a phase: `with progress("tokenise", 64, "rows") as advance: ... advance(3)`.

    A terminal shows a bar until the block ends; elsewhere (`msrun` writes its workers' output to files) there is a line
    at most every `interval` seconds. enabled: False on ranks other than 0. stream: standard output by default.
    compile_s: seconds of compiling so far, which rates exclude.
    """

    enabled: bool = True
    stream: TextIO | None = None
    interval: float = INTERVAL
    clock: Callable[[], float] = time.monotonic
    compile_s: Callable[[], float] = lambda: 0.0

    @contextmanager
    def __call__(self, phase: str, total: int, unit: str) -> Iterator[Advance]:
        """Show a phase of `total` units; yields a function that advances it."""
        stream = self.stream or sys.stdout
        if not self.enabled:
            yield lambda count, total=None: None
        elif stream.isatty():
            from rich import progress as rich
            from rich.console import Console

            counted = ("{task.description:>10}", rich.BarColumn(), rich.MofNCompleteColumn(), unit)
            times = (rich.TimeElapsedColumn(), "left", rich.TimeRemainingColumn())
            with rich.Progress(*counted, *times, console=Console(file=stream), transient=True) as bar:
                task = bar.add_task(phase, total=total)
                yield lambda count, total=None: bar.update(task, advance=count, total=total)
        else:
            yield self._lines(stream, phase, total, unit)

    def _lines(self, stream: TextIO, phase: str, total: int, unit: str) -> Advance:
        start = self._working_s()
        shown = self.clock()
        done = 0
        whole = total

        def advance(count: int, total: int | None = None) -> None:
            nonlocal done, shown, whole
            done = done + count
            whole = whole if total is None else total
            now = self.clock()
            spent = self._working_s() - start
            if now - shown >= self.interval and 0 < done < whole and spent > 0:
                shown = now
                rate = done / spent
                line = f"{phase}: {done:,}/{whole:,} {unit} ({done / whole:.0%}), {short_number(rate)}/s"
                print(f"{line}, {short_duration((whole - done) / rate)} left", file=stream, flush=True)

        return advance

    def _working_s(self) -> float:
        return self.clock() - self.compile_s()


@dataclass
class CompileLines:
    """Lines that count compiled graphs: `compiling graphs: 3 of 5, 12s`.

    The first graph has a line; then there is one at most every `interval` seconds.
    """

    stream: TextIO | None = None
    interval: float = INTERVAL
    clock: Callable[[], float] = time.monotonic
    shown: float | None = None

    def __call__(self, number: int, known: int, seconds: float) -> None:
        """Print that graph `number` of `known` is compiled; seconds: those of the earlier graphs."""
        now = self.clock()
        if self.shown is None or now - self.shown >= self.interval:
            self.shown = now
            line = f"compiling graphs: {number} of {known}, {short_duration(seconds)}"
            print(line, file=self.stream or sys.stdout, flush=True)


def counted(items: Iterable[Item], advance: Callable[[int], None]) -> Iterator[Item]:
    """Yield items, and advance by one when the next is asked for."""
    for item in items:
        yield item
        advance(1)
