"""Compiled graph over NumPy arrays, with its compilation time."""

import time

import numpy as np
from mindspore import Tensor, nn


class Compiled:
    """Graph with a count of compilation seconds.

    MindSpore compiles at the first run with each combination of shapes.
    seconds: of first runs since the last call of `collect`.
    """

    def __init__(self, graph: nn.Cell):
        self._graph = graph
        self._shapes: set[tuple] = set()
        self.seconds = 0.0

    def __call__(self, *arrays: np.ndarray):
        """Run the graph; returns its tensors."""
        start = time.perf_counter()
        out = self._graph(*map(Tensor.from_numpy, arrays))
        shapes = tuple(array.shape for array in arrays)
        if shapes not in self._shapes:
            self._shapes.add(shapes)
            self.seconds += time.perf_counter() - start
        return out

    def collect(self) -> float:
        """Return the seconds so far and set them to 0."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds
