"""Explicit broadcasting, for operands that are large.

MindSpore's CPU kernels of +, -, * and / keep, for as long as their graph lives, two tables of 8-byte indices for the
elements of a broadcast result, and `ops.where` three. A repeated operand (`Tile`) is freed after use, and faster. A
number or a tensor without dimensions on one side costs nothing and needs none of this.
"""

from mindspore import ops
from mindspore.ops import constexpr

_tile = ops.Tile()


@constexpr
def repeats(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Compute `Tile`'s repeats of each dimension; `shape` may lack leading ones."""
    missing = len(wanted) - len(shape)
    return tuple(size // (1 if i < missing else shape[i - missing]) for i, size in enumerate(wanted))


def expand(x, shape):
    """Repeat `x` along missing leading dimensions and those of size 1, to `shape`."""
    return _tile(x, repeats(x.shape, shape))
