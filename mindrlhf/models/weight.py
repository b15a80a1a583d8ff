"""Parameters in graphs, whose gradients are added to buffers at once.

`ops.value_and_grad(..., weights=parameters)` returns all gradients at the end, so that a second set of gradients, of
the model's size, is in memory until it is added to the buffers. Here the backward pass adds each gradient as soon as it
is computed, and frees it. The graph is differentiated by one number instead, the trigger, on which every weight
formally depends: to compute the trigger's gradient, the graph has to run all additions.

Untested on Ascend.
"""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops


class _Collect(nn.Cell):
    """Identity (weight, x, buffer, trigger) -> (weight, x) that collects a gradient.

    The weight's gradient is in the buffer before anything that x depends on gets a gradient.

    `bprop` may use a Parameter only as an argument.
    """

    def construct(self, weight, x, buffer, trigger):
        return weight, x

    def bprop(self, weight, x, buffer, trigger, out, d_out):
        done = ops.assign_add(buffer, d_out[0])
        return d_out[0], ops.depend(d_out[1], done), d_out[0], ops.depend(trigger, done)


class _CollectRows(nn.Cell):
    """Lookup (weight [V, H], ids int32[T], buffer, trigger) -> rows [T, H].

    Gradients are added to rows of the buffer, and a gradient [V, H] never exists.
    """

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.add = ops.ScatterAdd()

    def construct(self, weight, ids, buffer, trigger):
        return ops.gather(weight, ids, 0)

    def bprop(self, weight, ids, buffer, trigger, out, d_out):
        done = self.add(buffer, ids, d_out)
        return weight, ids, weight, ops.depend(trigger, done)


class Weight(nn.Cell):
    """Use of a parameter in a graph.

    packed: the parameter's form in decode steps, if it has another one.
    """

    def __init__(self, parameter: Parameter, packed: Parameter | None = None):
        super().__init__(auto_prefix=False)
        self.parameter = parameter
        self.is_packed = packed is not None
        if packed is not None:
            self.packed = packed
        self.collects = self.passes = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parameter.shape

    @property
    def decoded(self) -> Parameter:
        """The parameter's form in decode steps."""
        return self.packed if self.is_packed else self.parameter

    def construct(self, x):
        """Return (the parameter, x); the caller combines x with the parameter next."""
        if self.collects:
            return self.collect(self.parameter, x, self.buffer, self.trigger)
        return self.parameter, x

    def rows(self, ids):
        """Look up the parameter's rows with these indices."""
        if self.collects:
            return self.collect_rows(self.parameter, ids, self.buffer, self.trigger)
        return ops.gather(self.parameter, ids, 0)

    @property
    def collected(self) -> tuple:
        """The gradient's buffer and the trigger, for operators that add to it.

        It is () without a buffer.
        """
        return (self.buffer, self.trigger) if self.collects else ()

    def collect_into(self, buffer: Parameter | None, trigger: Parameter) -> None:
        """Let later-compiled graphs add the gradient to `buffer` in backward passes.

        buffer: None if the parameter does not train; gradients only pass on to x.
        """
        self.trigger = trigger
        self.passes = True
        if buffer is not None:
            self.collect = _Collect()
            self.collect_rows = _CollectRows()
            self.buffer = buffer
            self.collects = True


def collect_gradients(graph: nn.Cell, parameters: Sequence[Parameter], buffers: Sequence[Parameter]) -> ParameterTuple:
    """Let the backward pass of `graph` add each parameter's gradient to its buffer.

    Returns the parameters to differentiate by: the backward pass runs once their gradients are used. Other parameters
    of the graph do not train and have no gradient.
    Raises ValueError if a parameter is not read through a `Weight`.
    """
    trigger = Parameter(Tensor(np.float32(0)), name="gradient.trigger")
    by_parameter = {id(parameter): buffer for parameter, buffer in zip(parameters, buffers, strict=True)}
    found = set()
    for _, cell in graph.cells_and_names():
        if isinstance(cell, Weight):
            cell.collect_into(by_parameter.get(id(cell.parameter)), trigger)
            found.add(id(cell.parameter))
    missing = [parameter.name for parameter in parameters if id(parameter) not in found]
    if missing:
        raise ValueError(f"the graph reads {missing[0]} directly, and gradients are collected from a Weight only")
    return ParameterTuple([trigger])
