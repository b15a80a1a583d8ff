"""Reverse-mode differentiation of float64 NumPy arrays, for answers that are independent of MindSpore."""

from collections.abc import Callable, Sequence

import numpy as np

Slope = Callable[[np.ndarray], np.ndarray]  # from the slope at a result to the slope at one of its inputs


class Node:
    """float64 array, with the inputs that it was computed from and their slopes."""

    def __init__(self, value: "np.ndarray | float", inputs: Sequence[tuple["Node", Slope]] = ()):
        self.value = np.asarray(value, np.float64)
        self.inputs = inputs

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def __add__(self, other: "Node | np.ndarray | float") -> "Node":
        other = as_node(other)
        inputs = [(self, _summed_to(self.shape)), (other, _summed_to(other.shape))]
        return Node(self.value + other.value, inputs)

    def __mul__(self, other: "Node | np.ndarray | float") -> "Node":
        other = as_node(other)
        own = _summed_to(self.shape)
        others = _summed_to(other.shape)
        inputs = [(self, lambda slope: own(slope * other.value)), (other, lambda slope: others(slope * self.value))]
        return Node(self.value * other.value, inputs)

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> "Node":
        return self * -1.0

    def __sub__(self, other: "Node | np.ndarray | float") -> "Node":
        return self + -as_node(other)

    def __pow__(self, exponent: float) -> "Node":
        back = lambda slope: slope * exponent * self.value ** (exponent - 1)  # noqa: E731
        return Node(self.value**exponent, [(self, back)])

    def __truediv__(self, other: "Node | np.ndarray | float") -> "Node":
        return self * as_node(other) ** -1.0

    def __matmul__(self, other: "Node") -> "Node":
        """Multiply matrices, or equal stacks of matrices."""
        inputs = [
            (self, lambda slope: slope @ np.swapaxes(other.value, -1, -2)),
            (other, lambda slope: np.swapaxes(self.value, -1, -2) @ slope),
        ]
        return Node(self.value @ other.value, inputs)

    def __getitem__(self, index) -> "Node":
        """Select by a slice, or by arrays of indices, which may repeat."""

        def back(slope: np.ndarray) -> np.ndarray:
            whole = np.zeros(self.shape)
            np.add.at(whole, index, slope)
            return whole

        return Node(self.value[index], [(self, back)])

    @property
    def T(self) -> "Node":
        return self.transpose((1, 0))

    def transpose(self, axes: Sequence[int]) -> "Node":
        return Node(self.value.transpose(axes), [(self, lambda slope: slope.transpose(np.argsort(axes)))])

    def reshape(self, *shape: int) -> "Node":
        return Node(self.value.reshape(shape), [(self, lambda slope: slope.reshape(self.shape))])

    def sum(self, axis: int | None = None, keepdims: bool = False) -> "Node":
        def back(slope: np.ndarray) -> np.ndarray:
            if axis is not None and not keepdims:
                slope = np.expand_dims(slope, axis)
            return np.broadcast_to(slope, self.shape)

        return Node(self.value.sum(axis, keepdims=keepdims), [(self, back)])

    def mean(self, axis: int) -> "Node":
        """Average over an axis, which stays with size 1."""
        return self.sum(axis, keepdims=True) * (1.0 / self.shape[axis])


def as_node(value: "Node | np.ndarray | float") -> Node:
    return value if isinstance(value, Node) else Node(value)


def exp(x: Node) -> Node:
    value = np.exp(x.value)
    return Node(value, [(x, lambda slope: slope * value)])


def log(x: Node) -> Node:
    return Node(np.log(x.value), [(x, lambda slope: slope / x.value)])


def minimum(x: Node, y: Node) -> Node:
    """Select the smaller element; equal ones are the first's."""
    first = x.value <= y.value
    return x * first + y * ~first


def clip(x: Node, low: float, high: float) -> Node:
    inside = (x.value >= low) & (x.value <= high)
    return Node(np.clip(x.value, low, high), [(x, lambda slope: slope * inside)])


def concat(parts: Sequence[Node], axis: int = 0) -> Node:
    ends = np.cumsum([part.shape[axis] for part in parts])

    def back(index: int) -> Slope:
        start = ends[index] - parts[index].shape[axis]
        return lambda slope: np.take(slope, np.arange(start, ends[index]), axis)

    values = [part.value for part in parts]
    return Node(np.concatenate(values, axis), [(part, back(i)) for i, part in enumerate(parts)])


def stopped(x: Node) -> Node:
    """Return the values without a gradient."""
    return Node(x.value)


def softmax(x: Node) -> Node:
    """Compute the softmax over the last axis."""
    powers = exp(x - x.value.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def log_softmax(x: Node) -> Node:
    """Compute the logarithms of the softmax over the last axis."""
    shifted = x - x.value.max(-1, keepdims=True)
    return shifted - log(exp(shifted).sum(-1, keepdims=True))


def gradients(output: Node, slope: "np.ndarray | float", inputs: Sequence[Node]) -> list[np.ndarray]:
    """Compute the slopes at `inputs` of the sum of `output * slope`."""
    slopes = {id(output): np.broadcast_to(np.asarray(slope, np.float64), output.shape)}
    for node in reversed(_ordered(output)):
        own = slopes.get(id(node))
        if own is None:
            continue
        for source, back in node.inputs:
            added = back(own)
            slopes[id(source)] = slopes[id(source)] + added if id(source) in slopes else added
    return [np.array(slopes[id(one)]) if id(one) in slopes else np.zeros(one.shape) for one in inputs]


def _ordered(output: Node) -> list[Node]:
    """List all nodes that the output depends on, inputs first."""
    found: list[Node] = []
    known: set[int] = set()
    waiting = [(output, False)]
    while waiting:
        node, done = waiting.pop()
        if done:
            found.append(node)
        elif id(node) not in known:
            known.add(id(node))
            waiting.append((node, True))
            waiting += [(source, False) for source, _ in node.inputs]
    return found


def _summed_to(shape: tuple[int, ...]) -> Slope:
    """Make the function that sums a slope to `shape`.

    It sums over the axes along which an array of that shape was repeated.
    """

    def back(slope: np.ndarray) -> np.ndarray:
        slope = slope.sum(tuple(range(slope.ndim - len(shape))))
        repeated = tuple(i for i, size in enumerate(shape) if size == 1 and slope.shape[i] != 1)
        return slope.sum(repeated, keepdims=True) if repeated else slope

    return back
