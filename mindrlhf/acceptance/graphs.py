"""Graphs of the checks.

They compute an output, and the slopes of its product with given numbers.

Inputs and outputs of the graphs are float32; inside they have the dtype that is checked.
"""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindrlhf import backend
from mindrlhf.backend.compile.graph import Graph
from mindrlhf.backend.memory import zero_parameter
from mindrlhf.backend.operators import dtype_named
from mindrlhf.models.weight import collect_gradients


class Call(nn.Cell):
    """Call of a function with further fixed arguments."""

    def __init__(self, function, *fixed):
        super().__init__(auto_prefix=False)
        self.function = function
        self.fixed = fixed

    def construct(self, *inputs):
        return self.function(*inputs, *self.fixed)


class _Sloped(nn.Cell):
    """Sum of an output times slopes, and the output."""

    def __init__(self, cell: nn.Cell, dtype: str, count: int):
        super().__init__(auto_prefix=False)
        self.cell = cell
        self.dtype = dtype_named(dtype)
        self.count = count

    def construct(self, slopes, *inputs):
        cast = ()
        for i in range(self.count):
            cast += (inputs[i].astype(self.dtype),)
        out = self.cell(*cast, *inputs[self.count :]).astype("float32")
        return (out * slopes).sum(), out


class ThereAndBack(Graph):
    """Output of a cell, and gradients of its first `count` inputs.

    These inputs have `dtype` inside of the graph.

    Inputs: slopes float32, of the output's shape, then the cell's.
    """

    def __init__(self, cell: nn.Cell, dtype: str, count: int):
        super().__init__("acceptance")
        self.single = count == 1
        places = 1 if self.single else tuple(range(1, count + 1))
        self.run = ops.value_and_grad(_Sloped(cell, dtype, count), places, has_aux=True)

    def construct(self, slopes, *inputs):
        values, gradients = self.run(slopes, *inputs)
        return (values[1], gradients) if self.single else (values[1], *gradients)


class Once(Graph):
    """Outputs of a cell, float32."""

    def __init__(self, cell: nn.Cell):
        super().__init__("acceptance")
        self.cell = cell

    def construct(self, *inputs):
        found = ()
        for out in self.cell(*inputs):
            found += (out.astype("float32"),)
        return found


class Collected(Graph):
    """Outputs of a cell, the gradient of its first input, and those of weights.

    The first output is a loss.

    The gradients of weights are added to buffers, as in updates.
    """

    def __init__(self, cell: nn.Cell, weights: Sequence[Parameter]):
        super().__init__("acceptance")
        self.cell = cell
        self.names = tuple(one.name for one in weights)
        self.buffers = ParameterTuple([zero_parameter(f"buffer.{one.name}", one.shape) for one in weights])
        trigger = collect_gradients(cell, weights, self.buffers)
        self.run = ops.value_and_grad(cell, 0, weights=trigger, has_aux=True)

    def construct(self, *inputs):
        values, (first, done) = self.run(*inputs)
        return (*values, ops.depend(first, done))

    def gradients(self) -> dict[str, np.ndarray]:
        """Read the gradients of the weights, by name."""
        return {name: np.array(backend.read(one)) for name, one in zip(self.names, self.buffers, strict=True)}


def arrays_of(tensors: "Tensor | Sequence[Tensor]") -> list[np.ndarray]:
    """Copy a graph's outputs to the host."""
    return [one.asnumpy() for one in (tensors if isinstance(tensors, tuple) else (tensors,))]


def tensors(*arrays: np.ndarray) -> list[Tensor]:
    return [Tensor(np.ascontiguousarray(array)) for array in arrays]


def parameter(name: str, values: np.ndarray, dtype: str = "float32") -> Parameter:
    """Make a parameter of the dtype, with these values."""
    return Parameter(Tensor(values, dtype_named(dtype)), name=name, requires_grad=False)
