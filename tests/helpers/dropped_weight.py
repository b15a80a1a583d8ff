"""Weights whose adapters see an input with dropout, for the float64 oracle; and the masks, by their definition."""

import zlib

import numpy as np

from mindrlhf.random_numbers import random_keys


def mask(rows, name: str, share: float, columns: int) -> np.ndarray:
    """bool[T, columns] of kept elements; rows: the keys of T rows as Python's whole numbers or int32[T]."""
    keys = [int(key) for key in random_keys(zlib.crc32(name.encode()), np.arange(columns))]
    states = [[(int(row) + key) % 2**32 for key in keys] for row in rows]
    bits = np.array([[state * (2 * state + 1) % 2**32 for state in of_row] for of_row in states], np.uint32)
    return bits.view(np.int32) >= round(share * 2**32) - 2**31


class DroppedWeight(np.ndarray):
    """A weight [out, in] of which x @ weight.T has the product of its adapter with the kept elements of x."""

    @classmethod
    def of(cls, weight, a, b, scale: float, kept) -> "DroppedWeight":
        """a [r, in], b [out, r]; scale: with the factor 1 / (1 - share); kept: bool[S, in]."""
        self = np.asarray(weight, np.float64).view(cls)
        self.product = _Product(np.asarray(weight, np.float64), a, b, scale, kept)
        return self

    @property
    def T(self) -> "_Product":
        return self.product


class _Product:
    __array_ufunc__ = None  # so that x @ product asks here

    def __init__(self, weight, a, b, scale, kept):
        self.weight, self.a, self.b, self.scale, self.kept = weight, a, b, scale, kept

    def __rmatmul__(self, x):
        return x @ self.weight.T + self.scale * ((x * self.kept) @ self.a.T) @ self.b.T
