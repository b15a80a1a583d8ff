"""Packing of weights for decode steps.

Rows hold bfloat16 numbers, or int8 numbers with one scale for every 64 of them.
"""

import ctypes
import functools
from typing import TYPE_CHECKING

from mindrlhf.backend.native import library

if TYPE_CHECKING:
    import numpy as np


def row_words(weights: str, inputs: int) -> int:
    """Count the 32-bit words of a packed row.

    weights: bfloat16 or int8. inputs: elements of the row.
    """
    count = getattr(opened(), f"row_words_{weights}")
    count.restype = ctypes.c_int64
    return count(ctypes.c_int64(inputs))


def pack(weights: str, matrix: "np.ndarray", packed: "np.ndarray") -> None:
    """Pack float32[out, in] into int32[out, row_words]; both are C-contiguous."""
    sizes = map(ctypes.c_int64, matrix.shape)
    getattr(opened(), f"pack_{weights}")(address(matrix), *sizes, address(packed))


def address(array: "np.ndarray") -> ctypes.c_void_p:
    """Return where a C-contiguous array begins. Raises ValueError for another one."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {list(array.shape)} is not dense")
    return ctypes.c_void_p(array.ctypes.data)


@functools.cache
def opened() -> ctypes.CDLL:
    """Open the built library, which has to be there."""
    return ctypes.CDLL(str(library().path))
