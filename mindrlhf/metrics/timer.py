"""Wall-clock seconds of the phases of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STEP = "step"
COMPILE = "compile"


@dataclass
class Inner:
    """Seconds of blocks, with their seconds of compiling."""

    seconds: float = 0.0
    compile_s: float = 0.0


class Timers:
    """Timers of phases: `with timers("gen"): ...` adds the block's seconds.

    Blocks nest: seconds belong to the innermost phase alone, and to `step`. Seconds of compiling belong to the phase
    `compile`, and to no other phase except `step`: the phases of a step and `compile` add up to `step`. compile_s:
    seconds of compiling so far. on_phase: called with each block's phase when it begins, as part of
    it. clock: seconds from any origin.
    """

    def __init__(
        self,
        compile_s: Callable[[], float] = lambda: 0.0,
        on_phase: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._compile_s = compile_s
        self._on_phase = on_phase
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._inner = Inner()  # blocks inside the innermost open block

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        outer = self._inner
        self._inner = Inner()
        start = self._clock()
        compiled = self._compile_s()
        try:
            self._on_phase(phase)
            yield
        finally:
            elapsed = self._clock() - start
            compiled = self._compile_s() - compiled
            if phase == STEP:
                self.add(STEP, elapsed)
            else:
                compiling = compiled - self._inner.compile_s
                self.add(phase, elapsed - self._inner.seconds - compiling)
                self.add(COMPILE, compiling)
            self._inner = outer
            outer.seconds += elapsed
            outer.compile_s += compiled

    def add(self, phase: str, seconds: float) -> None:
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def collect(self) -> dict[str, float]:
        """Return seconds by phase since the last call, and begin again."""
        seconds = self._seconds
        self._seconds = {}
        return seconds
