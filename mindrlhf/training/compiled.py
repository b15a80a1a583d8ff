"""A compiled graph over NumPy arrays, and the time that building it took."""

import time

import numpy as np
from mindspore import Tensor, nn


class Compiled:
    """Runs a graph on arrays. MindSpore compiles at the first run with each combination of shapes.

    seconds: what first runs have taken since `collect` was called last.
    """

    def __init__(self, graph: nn.Cell):
        self._graph = graph
        self._shapes: set[tuple] = set()
        self.seconds = 0.0

    def __call__(self, *arrays: np.ndarray):
        """What the graph returns: tensors, as they come."""
        start = time.perf_counter()
        out = self._graph(*map(Tensor.from_numpy, arrays))
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._shapes:
            self._shapes.add(shapes)
            self.seconds += time.perf_counter() - start
        return out

    def collect(self) -> float:
        """The seconds so far; counts anew from here."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
