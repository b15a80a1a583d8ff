"""Patches of a resized image, as the vision tower takes them."""

import numpy as np

from mindrlhf.configs.images import RESCALE, ImageSettings


def image_patches(pixels: np.ndarray, settings: ImageSettings) -> np.ndarray:
    """Normalise a resized image uint8[H, W, 3], and cut it into patches.

    Returns float32[patches, `settings.patch_numbers`]. A row has channel, frame, row and column of its pixels. The rows
    come in squares of `merge_size` patches, which become one token: squares line by line, and within them patches line
    by line.
    """
    side = settings.patch_size
    merge = settings.merge_size
    rows, columns = (size // side for size in pixels.shape[:2])
    shape = (rows // merge, merge, side, columns // merge, merge, side, 3)
    squares = pixels.reshape(shape).transpose((0, 3, 1, 4, 6, 2, 5)).reshape((rows * columns, 3, 1, side * side))
    table = _normalised_bytes(settings)
    values = table[np.arange(3).reshape((1, 3, 1, 1)), squares]
    frames = np.broadcast_to(values, (rows * columns, 3, settings.temporal_patch_size, side * side))
    return frames.reshape((rows * columns, settings.patch_numbers))


def _normalised_bytes(settings: ImageSettings) -> np.ndarray:
    """Normalise every byte of each channel: float32[3, 256].

    The scaling to 0...1 is in float64 and is rounded to float32; the rest is in float32.
    """
    scaled = (np.arange(256) * RESCALE).astype(np.float32)
    mean = np.array(settings.image_mean, np.float32)[:, None]
    std = np.array(settings.image_std, np.float32)[:, None]
    return (scaled - mean) / std
