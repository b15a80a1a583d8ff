"""Progress inside a phase: a terminal bar, or occasional lines in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO, TypeVar

from mindrlhf.metrics.console import short_duration, short_number

Item = TypeVar("Item")


@dataclass(frozen=True)
class Progress:
    """Progress of a phase: `with progress("generate", 64, "responses") as advance: ... advance(3)`.

    A bar on a terminal, gone when the block ends; elsewhere (`msrun` writes its workers' output to files) a line at
    most every `interval` seconds. enabled: False on ranks other than 0. stream: standard output by default.
    """

    enabled: bool = True
    stream: TextIO | None = None
    interval: float = 5.0
    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def __call__(self, phase: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Show a phase of `total` units; yields a function that advances it."""
        stream = self.stream or sys.stdout
        if not self.enabled:
            yield lambda count: None
        elif stream.isatty():
            from rich import progress as rich
            from rich.console import Console

            counted = ("{task.description:>10}", rich.BarColumn(), rich.MofNCompleteColumn(), unit)
            times = (rich.TimeElapsedColumn(), "left", rich.TimeRemainingColumn())
            with rich.Progress(*counted, *times, console=Console(file=stream), transient=True) as bar:
                task = bar.add_task(phase, total=total)
                yield lambda count: bar.advance(task, count)
        else:
            yield self._lines(stream, phase, total, unit)

    def _lines(self, stream: TextIO, phase: str, total: int, unit: str) -> Callable[[int], None]:
        start = shown = self.clock()
        done = 0

        def advance(count: int) -> None:
            nonlocal done, shown
            done += count
            now = self.clock()
            if now - shown >= self.interval and done:
                shown, rate = now, done / (now - start)
                line = f"{phase}: {done}/{total} {unit} ({done / max(total, 1):.0%}), {short_number(rate)}/s"
                print(f"{line}, {short_duration((total - done) / rate)} left", file=stream, flush=True)

        return advance


def counted(items: Iterable[Item], advance: Callable[[int], None]) -> Iterator[Item]:
    """Yield items, and advance by one when the next is asked for."""
    for item in items:
        yield item
        advance(1)
