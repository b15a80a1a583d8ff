"""Updates with rounded moments from MindSpore's basic operators (`mindrlhf.optimizer_state` describes the forms).

The largest matrix has about ten temporary arrays of its size.
"""

import numpy as np
from mindspore import Tensor, ops
from mindspore.common.dtype import bfloat16, float32, int8, int32, uint8
from mindspore.ops import constexpr

from mindrlhf.optimizer_state import BLOCK, CODES, LEAST_SCALE, TOP

# More than half of the distance from a bfloat16 number to its neighbours, and less than one and a half.
NEXT = 1.25 * 2.0**-8


def rounded_adamw(parameters, gradients, first, second, scales, decays, rows, numbers, draws, columns):
    """Update parameters in place; see `Operators.rounded_adamw`."""
    rate, beta1, beta2, eps, decay, scale = numbers
    done = rate
    count = len(parameters)
    start = 0
    for i in range(count):
        gradient = gradients[i]
        size = parameters[i].shape[-1]
        begin, end = rows[i]
        own = gradient if end - begin == gradient.shape[0] else gradient[begin:end]
        slope = own.reshape((-1, size)) * scale
        weight = parameters[i].reshape((-1, size))
        height = slope.shape[0]
        uniform = draws[0][start : start + height].reshape((height, 1))
        start += height
        each = scales[i : 2 * count : count]
        one = beta1 * _values(first[i], size, each[:1]) + (1 - beta1) * slope
        two = beta2 * _values(second[i], size, each[1:]) + (1 - beta2) * slope * slope
        step = one / (ops.sqrt(two) + eps)
        if decays[i]:
            step = step + decay * weight
        done = ops.depend(done, ops.assign_sub(parameters[i], (rate * step).reshape(parameters[i].shape)))
        done = ops.depend(done, _store(first[i], one, each[:1], _draw(uniform, draws[1], 0, columns[i], size)))
        done = ops.depend(done, _store(second[i], two, each[1:], _draw(uniform, draws[1], 1, columns[i], size)))
        done = ops.depend(done, ops.assign_sub(gradient, ops.depend(gradient, done)))  # as in `Operators.adamw`
    return done


def _draw(rows, columns, kind, first, size):
    """Add random numbers of rows and columns, without what is before the point."""
    total = rows + columns[kind : kind + 1, first : first + size]
    return total - ops.floor(total)


def _values(moment, size, scales):
    """Convert a moment to float32[rows, size]."""
    if len(scales) == 0:
        return moment.astype(float32).reshape((-1, size))
    flat = moment.reshape((-1, size))
    table = _table("second" if moment.dtype == uint8 else "first")
    codes = flat.astype(int32)
    values = ops.gather(table, ops.abs(codes).reshape((-1,)), 0).reshape(codes.shape)
    values = values * _wide(scales[0].reshape((flat.shape[0], -1)), size)
    return ops.select(codes < 0, -values, values) if moment.dtype == int8 else values


def _store(moment, values, scales, uniform):
    """Round values [rows, size] into a moment and its scales."""
    if len(scales) == 0:
        return moment.copy_(_bfloat16(values, uniform, moment.shape))
    size = values.shape[1]
    magnitudes = ops.abs(values)
    found = _scales(magnitudes, size)
    wide = _wide(found, size)
    table = _table("second" if moment.dtype == uint8 else "first")
    scaled = magnitudes / ops.select(wide > 0, wide, ops.ones_like(wide))
    scaled = ops.maximum(scaled, table[0]).reshape((-1,))
    below = ops.searchsorted(table, scaled, right=True).astype(int32) - 1
    above = ops.minimum(below + 1, table.shape[0] - 1)
    lower = ops.gather(table, below, 0)
    gap = ops.gather(table, above, 0) - lower
    codes = (below + (uniform.reshape((-1,)) * gap < scaled - lower).astype(int32)).reshape(values.shape)
    if moment.dtype == int8:
        codes = ops.select(values < 0, -codes, codes)
    done = moment.copy_(codes.astype(moment.dtype).reshape(moment.shape))
    return ops.depend(scales[0].copy_(found.reshape(scales[0].shape)), done)


def _bfloat16(values, uniform, shape):
    """Round float32 to one of both bfloat16 neighbours, in proportion to the distances."""
    magnitudes = ops.abs(values)
    near = magnitudes.astype(bfloat16).astype(float32)
    other = (near + ops.sign(magnitudes - near) * near * NEXT).astype(bfloat16).astype(float32)
    lower, upper = ops.minimum(near, other), ops.maximum(near, other)
    found = ops.select(uniform * (upper - lower) < magnitudes - lower, upper, lower)
    return ops.select(values < 0, -found, found).reshape(shape).astype(bfloat16)


def _scales(magnitudes, size):
    """Compute the scales of blocks [rows, blocks] of magnitudes [rows, size]."""
    rows = magnitudes.shape[0]
    rest = -size % BLOCK
    if rest:
        magnitudes = ops.concat((magnitudes, ops.zeros((rows, rest), float32)), 1)
    largest = magnitudes.reshape((rows, -1, BLOCK)).max(-1)
    powers, ends = _powers(), _ends()
    places = ops.minimum(ops.searchsorted(ends, largest).astype(int32), powers.shape[0] - 1)
    found = ops.gather(powers, places.reshape((-1,)), 0).reshape(largest.shape)
    return ops.select(largest > 0, found, ops.zeros_like(found))


def _wide(scales, size):
    """Repeat scales [rows, blocks] to [rows, size]."""
    rows, blocks = scales.shape
    every = ops.tile(scales.reshape((rows, blocks, 1)), (1, 1, BLOCK)).reshape((rows, blocks * BLOCK))
    return every[:, :size]


@constexpr
def _table(moment):
    """Make the constant table of a moment's codes."""
    return Tensor(CODES[moment])


@constexpr
def _powers():
    """Make the constant table of scales, ascending."""
    return Tensor(2.0 ** np.arange(round(np.log2(LEAST_SCALE)), 128).astype(np.float32))


@constexpr
def _ends():
    """Make the table of the largest magnitudes under each scale."""
    return Tensor((TOP * 2.0 ** np.arange(round(np.log2(LEAST_SCALE)), 127)).astype(np.float32))
