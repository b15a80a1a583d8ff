"""Wall-clock seconds of the phases of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP = "step"
COMPILE = "compile"


class Timers:
    """Timers of phases: `with timers("gen"): ...` adds the block's seconds.

    Blocks nest, and an outer phase includes its inner ones; a phase inside itself counts once.
    on_phase: called with each block's phase when it begins, as part of it. clock: seconds from any origin.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, on_phase: Callable[[str], None] = lambda phase: None
    ):
        self._clock, self._on_phase = clock, on_phase
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._open.append(phase)
        start = self._clock()
        try:
            self._on_phase(phase)
            yield
        finally:
            elapsed = self._clock() - start
            self._open.pop()
            if phase not in self._open:
                self.add(phase, elapsed)

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def compile(self, seconds: float) -> None:
        """Move seconds spent compiling from the open phases to the phase `compile`.

        The phase `step` stays whole: the phases of a step and `compile` add up to it.
        """
        self.add(COMPILE, seconds)
        for phase in set(self._open) - {STEP}:
            self.add(phase, -seconds)

    def collect(self) -> dict[str, float]:
        """Return seconds by phase since the last call, and begin again."""
        seconds, self._seconds = self._seconds, {}
        return seconds
