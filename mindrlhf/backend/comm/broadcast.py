"""Explicit broadcasting of large operands.

MindSpore's CPU kernels of +, -, * and / keep two tables of 8-byte indices, as long as a broadcast result, for the life
of their graph; `ops.where` keeps three. A repeated operand (`Tile`) is faster, and freed after use. A scalar on one
side costs nothing and needs no `expand`.
"""

from mindspore import ops
from mindspore.ops import constexpr

_tile = ops.Tile()


@constexpr
def repeats(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Compute `Tile`'s repeats per dimension; `shape` may lack leading dimensions."""
    missing = len(wanted) - len(shape)
    return tuple(size // (1 if i < missing else shape[i - missing]) for i, size in enumerate(wanted))


def expand(x, shape):
    """Repeat `x` along missing leading dimensions and dimensions of size 1, to `shape`."""
    return _tile(x, repeats(x.shape, shape))
