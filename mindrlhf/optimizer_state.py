"""Forms of the optimizer's moments (`optimizer.state`): float32, bfloat16, 8-bit codes. Pure Python.

Vectors (norms, biases) have float32 moments in every form.

int8: a code is a float of 8 bits under a scale, a power of two that `BLOCK` consecutive numbers of a row share (scales
of blocks: Dettmers et al. 2022, arXiv:2110.02861). The first moment has a sign, 4 bits of exponent and 3 of mantissa,
with zero and subnormal numbers. The second has 5 and 3 bits and no zero: what is below its smallest code is rounded up
to it, because a first moment over a second one of zero would be an enormous step. Only a block of nothing but zeros has
zeros: its scale is 0. All codes are exact in float32, so that moments are stored, read and stored again without loss;
only where blocks are cut elsewhere, numbers below the smallest code of a new block are rounded.
"""

from collections.abc import Sequence
from math import ceil, prod
from typing import Literal, get_args

import numpy as np

State = Literal["float32", "bfloat16", "int8"]
STATES = get_args(State)
Moment = Literal["first", "second"]

BLOCK = 128  # numbers of a row under one scale
LEAST_SCALE = 2.0**-90  # so that the smallest code is a normal float32
TOP = 1.875  # the largest code under a scale of 1
SCALES = ".scales"  # behind the name of an array of codes
_PIECE = 1 << 16  # numbers that are converted at a time: the temporaries stay in the cache
_LOWER = 20  # bits of a float32's mantissa that a code lacks


def _codes(exponents: int, subnormal: bool) -> np.ndarray:
    """List the values of all codes, under a scale of 1."""
    exponent, mantissa = np.divmod(np.arange(8 * exponents), 8)
    values = (1 + mantissa / 8) * 2.0 ** (exponent - exponents + 1)
    if subnormal:
        values[:8] = np.arange(8) / 8 * 2.0 ** (2 - exponents)
    return values.astype(np.float32)


CODES = {"first": _codes(16, True), "second": _codes(32, False)}
DTYPES = {"first": "int8", "second": "uint8"}


def form_of(state: State, shape: Sequence[int]) -> State:
    """Return the form of the moments of a parameter with this shape."""
    return state if len(shape) > 1 else "float32"


def form_named(dtype: str) -> str:
    """Return the form whose numbers have this dtype of NumPy or safetensors."""
    return "int8" if dtype in ("int8", "uint8", "I8", "U8") else dtype


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of an array of codes."""
    return (*shape[:-1], ceil(shape[-1] / BLOCK))


def moment_bytes(state: State, shape: Sequence[int]) -> int:
    """Compute the bytes of one moment of a parameter."""
    form = form_of(state, shape)
    if form == "int8":
        return prod(shape) + 4 * prod(scales_shape(shape))
    return prod(shape) * (2 if form == "bfloat16" else 4)


def block_scales(largest: np.ndarray) -> np.ndarray:
    """Compute the scale of blocks with these largest magnitudes; float32."""
    part, exponent = np.frexp(largest.astype(np.float32))  # part: 0 or in [0.5, 1)
    scales = np.ldexp(np.float32(1), exponent - (2 * part <= TOP))
    return np.where(largest > 0, np.maximum(scales, LEAST_SCALE), 0).astype(np.float32)


def encode(values: np.ndarray, moment: Moment, uniform: np.ndarray | float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Round float32[..., n] to codes; returns them with their scales.

    uniform: in [0, 1), of the shape of values; a number between two codes gets the larger magnitude if `uniform` is
    below its share of the way. 0.5 rounds to the nearest.
    """
    size = values.shape[-1]
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, size)
    draws = np.broadcast_to(np.float32(uniform), values.shape).reshape(flat.shape)
    codes = np.empty(flat.shape, DTYPES[moment])
    scales = np.empty((len(flat), ceil(size / BLOCK)), np.float32)
    step = max(1, _PIECE // size)
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        codes[part], scales[part] = _encode_rows(flat[part], moment, draws[part])
    return codes.reshape(values.shape), scales.reshape(scales_shape(values.shape))


def _encode_rows(rows: np.ndarray, moment: Moment, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode float32[rows, n].

    The upper bits of a number under its scale are its code, and the lower ones its share of the way to the next.
    """
    table = CODES[moment]
    magnitudes = np.abs(rows)
    scales = block_scales(np.maximum.reduceat(magnitudes, np.arange(0, rows.shape[1], BLOCK), axis=1))
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)  # exact: they are powers of two
    scaled = np.maximum(magnitudes * _wide(inverse, rows.shape[1]), table[0])
    bits = scaled.view(np.uint32)
    first = table[8:9].view(np.uint32) >> _LOWER  # the first code whose exponent is its own
    codes = (bits >> _LOWER).astype(np.int16) - (first.astype(np.int16) - 8)
    share = (bits & ((1 << _LOWER) - 1)).astype(np.float32) * np.float32(2.0**-_LOWER)
    if moment == "first":
        steps = scaled / table[1]
        small = scaled < table[8]
        codes = np.where(small, steps, codes).astype(np.int16)
        share = np.where(small, steps - codes, share)
    codes += uniform < share
    return (np.where(rows < 0, -codes, codes) if moment == "first" else codes), scales


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Convert codes with their scales to float32; exact."""
    table = CODES["second"] if codes.dtype == np.uint8 else np.concatenate([-CODES["first"][:0:-1], CODES["first"]])
    lowest = 0 if codes.dtype == np.uint8 else 1 - len(CODES["first"])
    size = codes.shape[-1]
    flat, wide = codes.reshape(-1, size), scales.reshape(-1, scales.shape[-1])
    values = np.empty(flat.shape, np.float32)
    step = max(1, _PIECE // max(1, size))
    for start in range(0, len(flat), step):
        part = slice(start, start + step)
        np.multiply(table[flat[part].astype(np.int16) - lowest], _wide(wide[part], size), out=values[part])
    return values.reshape(codes.shape)


def _wide(scales: np.ndarray, size: int) -> np.ndarray:
    """Repeat each scale for the numbers of its block."""
    return np.repeat(scales, BLOCK, axis=-1)[..., :size]
