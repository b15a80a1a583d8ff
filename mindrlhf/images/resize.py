"""Bicubic resize of bytes in fixed-point arithmetic, with the bits of Pillow 13's.

The result of Pillow depends on its version: from 13 on, an image that shrinks more in height than in width is resized
along its height first, and each pass rounds to bytes. One byte in five may differ by one.
"""

import numpy as np

FIXED_BITS = 22
"""Bits after the point of a weight."""
SHARPNESS = -0.5
"""Parameter a of the cubic convolution kernel (Keys 1981)."""
REACH = 2.0
"""Pixels from the kernel's centre to its end, at the resized image's scale."""
BLOCK_NUMBERS = 1 << 20
"""Sums computed at once: they stay in the processor's cache."""


def resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize uint8[H, W, C] to uint8[height, width, C]."""
    rows, columns = pixels.shape[:2]
    vertical_first = height < rows and rows - height > 2 * (columns - width)
    for axis in (0, 1) if vertical_first else (1, 0):
        size = (height, width)[axis]
        if pixels.shape[axis] != size:
            pixels = _along(pixels, axis, size)
    return pixels


def _along(pixels: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Resize one axis; sums are rounded to the nearest byte."""
    lines = np.ascontiguousarray(np.moveaxis(pixels, axis, 0))
    flat = lines.reshape((lines.shape[0], -1))
    first, weights = _taps(lines.shape[0], size)
    out = np.empty((size, flat.shape[1]), np.uint8)
    step = max(1, BLOCK_NUMBERS // flat.shape[1])
    for start in range(0, size, step):
        stop = min(size, start + step)
        sums = np.full((stop - start, flat.shape[1]), 1 << (FIXED_BITS - 1), np.int32)
        for tap in range(weights.shape[1]):
            places = np.minimum(first[start:stop] + tap, len(flat) - 1)  # beyond the end, weights are 0
            sums += flat[places] * weights[start:stop, tap, None]
        out[start:stop] = np.clip(sums >> FIXED_BITS, 0, 255)
    return np.moveaxis(out.reshape((size, *lines.shape[1:])), 0, axis)


def _taps(old: int, new: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute each output place's first input place and its fixed-point weights.

    Returns int64[new] and int32[new, taps]; weights beyond a place's last tap are 0.
    """
    scale = old / new
    stretch = max(scale, 1.0)
    reach = REACH * stretch
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum(np.trunc(centre - reach + 0.5), 0).astype(np.int64)
    end = np.minimum(np.trunc(centre + reach + 0.5), old).astype(np.int64)
    tap = np.arange((end - first).max())
    distance = (tap + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch)
    weights = np.where(tap < (end - first)[:, None], _kernel(np.abs(distance)), 0.0)
    weights /= np.cumsum(weights, 1)[:, -1:]  # one after the other: the last bit decides some roundings
    fixed = weights * (1 << FIXED_BITS)
    return first, np.trunc(np.where(weights < 0, fixed - 0.5, fixed + 0.5)).astype(np.int32)


def _kernel(x: np.ndarray) -> np.ndarray:
    """Evaluate the cubic convolution kernel at distances x >= 0."""
    near = ((SHARPNESS + 2.0) * x - (SHARPNESS + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * SHARPNESS
    return np.where(x < 1.0, near, np.where(x < REACH, far, 0.0))
