"""Copies of much memory at once."""

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from mindrlhf.backend.native import library


def stream_copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy dense uint8[n], past the processor's caches if the C++ operators are there."""
    if source.shape != target.shape:
        raise ValueError(f"{source.size} bytes do not fill {target.size}")
    streamed = _streamed()
    if streamed is None:
        np.copyto(target, source)
    else:
        streamed(source.ctypes.data, source.size, target.ctypes.data)


@functools.cache
def _streamed() -> Callable[[int, int, int], None] | None:
    path = library().path
    if path is None:
        return None
    copy = ctypes.CDLL(str(path)).stream_copy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    copy.restype = None
    return copy
