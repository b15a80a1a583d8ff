"""Root of a compiled graph."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from weakref import WeakSet

import numpy as np
from mindspore import Tensor, nn
from mindspore.graph.api import _cell_graph_executor

from mindrlhf.backend.compile.graph_cache import GraphCache

Constant = int | float | str | tuple


class PythonCell(nn.Cell):
    """Cell that runs Python code inside a graph.

    Such a graph works in the process that compiled it only.
    """


class Graph(nn.Cell):
    """Cell that is called often: every decode step, every micro-batch.

    A call of a Cell checks for all possible changes since the graph was compiled, which takes longer than many graphs
    run. Here only shapes and dtypes of the inputs may change: a graph with known shapes runs at once. MindSpore also
    writes the name of the compiled graph (`compile_phase`) into all cells below, where only its automatic parallelism
    reads it: two milliseconds for a model of four layers. Here the name stays at the root.

    name: the graph's kind, such as "generate/decode". constants: numbers and strings that are compiled into the graph
    and do not follow from the job's settings, such as the longest prompt's length. cache: see `kept_graphs`.
    """

    cache: GraphCache | None = None
    compile_s = 0.0  # of all graphs: their first runs with new shapes or dtypes of inputs
    compiled = 0  # number of these first runs, for `announce`
    waiting: WeakSet = WeakSet()  # graphs that have not run yet
    announce: Callable[[int, int, float], None] | None = None  # see `announced`
    told: Callable[[str, float], None] | None = None  # see `timed`

    def __init__(self, name: str, *constants: Constant):
        super().__init__(auto_prefix=False)
        self.name = name
        self.constants = constants
        self._known_phases: dict[tuple, str] = {}
        Graph.waiting.add(self)

    def __call__(self, *inputs: Tensor):
        kinds = tuple((one.shape, one.dtype) for one in inputs)
        phase = self._known_phases.get(kinds)
        if phase is not None:
            return _cell_graph_executor._graph_executor(inputs, phase)
        if Graph.announce:
            Graph.announce(Graph.compiled + 1, Graph.compiled + len({*Graph.waiting, self}), Graph.compile_s)
        start = time.perf_counter()
        out = super().__call__(*inputs)
        if self.current_phase in self.compile_cache:
            self._known_phases[kinds] = self.current_phase
            seconds = time.perf_counter() - start
            Graph.compile_s += seconds
            Graph.compiled += 1
            Graph.waiting.discard(self)
            if Graph.told:
                Graph.told(self.name, seconds)
        return out

    def on_arrays(self, *arrays: np.ndarray | Tensor):
        """Run the graph on NumPy arrays, or tensors; returns its tensors."""
        return self(*(one if isinstance(one, Tensor) else Tensor.from_numpy(one) for one in arrays))

    def compile(self, *args, **kwargs):
        """Compile if needed; give freed memory, hundreds of MiB, back to the system."""
        known = len(self.compile_cache)
        portable = not any(isinstance(cell, PythonCell) for _, cell in self.cells_and_names())
        with Graph.cache.around(self, args) if Graph.cache and portable else nullcontext():
            super().compile(*args, **kwargs)
        if len(self.compile_cache) > known:
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
            if trim:
                trim(0)

    @property
    def compile_phase(self):
        return self._compile_phase

    @compile_phase.setter
    def compile_phase(self, value):
        self._compile_phase = value


def compile_seconds() -> float:
    """Seconds that this process has compiled so far, for `metrics.timer.Timers`."""
    return Graph.compile_s


@contextmanager
def announced(announce: Callable[[int, int, float], None]) -> Iterator[None]:
    """Call a function before each graph that is compiled in the body.

    announce(number, known, seconds): the graph is the `number`-th of `known` graphs in the body, and all graphs before
    it took `seconds`. `known` grows when graphs get inputs of new shapes.
    """
    Graph.announce = announce
    Graph.compiled = 0
    try:
        yield
    finally:
        Graph.announce = None


@contextmanager
def timed(told: Callable[[str, float], None]) -> Iterator[None]:
    """Call a function after each graph that is compiled in the body.

    told(name, seconds): of the graph; its first run is included.
    """
    Graph.told = told
    try:
        yield
    finally:
        Graph.told = None


@contextmanager
def kept_graphs(cache: GraphCache | None) -> Iterator[GraphCache | None]:
    """Use a cache, if any, for graphs that are compiled in the body."""
    Graph.cache = cache
    try:
        yield cache
    finally:
        Graph.cache = None
