"""Progress inside a phase: a terminal bar, or occasional lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from mindrlhf.metrics.console import short_duration, short_number


class Progress:
    """Progress of a phase, as a context manager.

    `with progress("generate", 64, "responses") as advance: ... advance(3)` shows a bar on a terminal that goes away
    when the block ends; elsewhere (`msrun` writes its workers' output to files) a line at most every `interval`
    seconds, so that a phase shorter than that prints nothing.
    """

    def __init__(
        self,
        enabled: bool = True,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Choose the output.

        enabled: False on ranks other than 0, and where nobody wants to see it. stream: standard output by default.
        interval: seconds between plain lines.
        """
        self._enabled = enabled
        self._stream = stream or sys.stdout
        self._interval = interval
        self._clock = clock

    @contextmanager
    def __call__(self, phase: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        """Show a phase of `total` units; yields the function that advances it.

        The function is called with the number of further units.
        """
        if not self._enabled:
            yield lambda count: None
        elif self._stream.isatty():
            with self._bar(phase, total, unit) as advance:
                yield advance
        else:
            yield self._lines(phase, total, unit)

    @contextmanager
    def _bar(self, phase: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=Console(file=self._stream), transient=True) as bar:
            task = bar.add_task(phase, total=total)
            yield lambda count: bar.advance(task, count)

    def _lines(self, phase: str, total: int, unit: str) -> Callable[[int], None]:
        start = shown = self._clock()
        done = 0

        def advance(count: int) -> None:
            nonlocal done, shown
            done += count
            now = self._clock()
            if now - shown < self._interval or not done:
                return
            shown = now
            rate = done / (now - start)
            line = f"{phase}: {done}/{total} {unit} ({done / max(total, 1):.0%}), {short_number(rate)}/s"
            print(f"{line}, {short_duration((total - done) / rate)} left", file=self._stream, flush=True)

        return advance
