"""bfloat16 numbers in NumPy, by the encoding of weight files."""

import numpy as np

from mindrlhf.checkpoint.stored_tensor import decode, encode


def rounded(x: np.ndarray) -> np.ndarray:
    """float64 of the nearest bfloat16 numbers."""
    return decode(encode(x.astype(np.float32), "bfloat16", "x"), "bfloat16").astype(np.float64).reshape(x.shape)


def pairs(x: np.ndarray) -> np.ndarray:
    """float32[..., d] -> int32[..., d / 2]: two bfloat16 numbers each."""
    return encode(x, "bfloat16", "x").reshape(x.shape).view(np.int32)
