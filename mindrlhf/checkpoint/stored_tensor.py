"""Tensors in weight files, read on demand, and their numbers: float32, float16, bfloat16.

NumPy has no bfloat16: such a number is the upper half of a float32, handled here as its bits in uint16.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np

from mindrlhf import optimizer_state
from mindrlhf.errors import UserError
from mindrlhf.models.parameter_spec import View

StoredDtype = Literal["float32", "float16", "bfloat16"]

# The NumPy view of each stored type, little-endian as in both file formats.
STORAGE = {"float32": np.dtype("<f4"), "float16": np.dtype("<f2"), "bfloat16": np.dtype("<u2")}
# Codes of an optimizer's moments, which are no numbers without their scales: by NumPy's name, and as files name them.
CODES = {"int8": np.dtype("i1"), "uint8": np.dtype("u1"), "I8": np.dtype("i1"), "U8": np.dtype("u1")}

_BLOCK = 1 << 16  # elements rounded at a time: the temporaries stay in the cache, which is seven times faster


def decode(raw: np.ndarray, dtype: StoredDtype) -> np.ndarray:
    """Convert numbers of `STORAGE[dtype]` to a new contiguous float32 array; exact."""
    if dtype != "bfloat16":
        return raw.astype(np.float32, order="C")
    bits = raw.astype(np.uint32, order="C")
    bits <<= 16
    return bits.view(np.float32)


def encode(array: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Round a float array, called `name`, to contiguous `STORAGE[dtype]`: ties to even.

    Codes, and bfloat16 numbers of MindSpore, stay as they are.
    """
    if dtype in CODES:
        return np.ascontiguousarray(array, CODES[dtype])
    if str(array.dtype) == dtype == "bfloat16":
        return np.ascontiguousarray(array.view(STORAGE[dtype]))
    array = np.ascontiguousarray(array, dtype=np.float32)
    if dtype == "bfloat16":
        return _bfloat16_bits(array)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = array.astype(STORAGE[dtype])
        if np.any(np.isinf(half) & np.isfinite(array)):
            largest = np.max(np.abs(array[np.isfinite(array)]))
            raise UserError(f"{name}: the value {largest:g} is beyond float16's 65504; write bfloat16 or float32.")
        return half
    return array.astype(STORAGE[dtype], copy=False)


def _bfloat16_bits(array: np.ndarray) -> np.ndarray:
    """Convert float32 to bfloat16 bits (uint16).

    Adding half of the last kept bit, less one if that bit is even, then truncating rounds to nearest, ties to even.
    """
    result = np.empty(array.shape, dtype=STORAGE["bfloat16"])
    source = array.reshape(-1).view(np.uint32)
    target = result.reshape(-1)
    for start in range(0, source.size, _BLOCK):
        bits = source[start : start + _BLOCK]
        upper = bits >> 16
        rounded = (bits + ((upper & 1) + np.uint32(0x7FFF))) >> 16
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        if nan.any():  # the addition could carry a NaN over to infinity or zero; keep its upper bits and stay quiet
            quiet = np.where(upper & 0x7F, upper, upper | 0x40)
            rounded = np.where(nan, quiet, rounded)
        target[start : start + _BLOCK] = rounded
    return result


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file, not loaded.

    dtype: the stored type by its NumPy name. segments: (offset, size) in bytes, within the file; several when the
    format cuts a large tensor into pieces. view: the numbers of the segments that are the tensor; None if all are.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]
    view: View | None = field(default=None, kw_only=True)

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read the tensor, or the part `index`, as a new contiguous float32 array.

        Only the pages of that part are read from the file (all pages if the tensor has several segments).
        """
        self.check()
        try:
            pieces = [
                np.memmap(self.file, STORAGE[self.dtype], "r", offset, (size // STORAGE[self.dtype].itemsize,))
                for offset, size in self.segments
            ]
        except (OSError, ValueError) as error:
            raise UserError(f"{self.file}: tensor {self.name} cannot be read ({error}).") from error
        # As plain arrays: slices of a memmap would keep its class, and with it the whole file mapped.
        flat = np.asarray(pieces[0]) if len(pieces) == 1 else np.concatenate(pieces)
        if self.view:
            flat = flat.reshape(self.view.dims)[tuple(slice(*ends) for ends in self.view.box)]
            flat = flat.transpose(self.view.order) if self.view.order else flat
        return decode(flat.reshape(self.shape)[index or ()], self.dtype)

    def check(self, shape: tuple[int, ...] | None = None) -> None:
        """Raise a UserError for a type that cannot be read, or another shape."""
        if self.dtype not in STORAGE:
            known = ", ".join(STORAGE)
            raise UserError(f"{self.file}: tensor {self.name} is stored as {self.dtype}, and {known} can be read.")
        if shape not in (None, self.shape):
            found = f"{self.file}: tensor {self.name} has shape {list(self.shape)} in place of {list(shape)}"
            raise UserError(f"{found}; give weights and layout of one model.")


@dataclass(frozen=True)
class CodedTensor(StoredTensor):
    """Codes of an optimizer's moment in a file, with their scales; read as numbers."""

    scales: StoredTensor = field(kw_only=True)

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read the numbers, or the part `index`, as a new contiguous float32 array."""
        *rows, columns = index or (slice(None),) * len(self.shape)
        numbers = optimizer_state.decode(self.codes(tuple(rows)), self.scales.read((*rows, slice(None))))
        return np.ascontiguousarray(numbers[..., columns])

    def codes(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Map the codes, or the part `index`."""
        ((offset, _),) = self.segments
        try:
            return np.asarray(np.memmap(self.file, CODES[self.dtype], "r", offset, self.shape)[index])
        except (OSError, ValueError) as error:
            raise UserError(f"{self.file}: tensor {self.name} cannot be read ({error}).") from error


def joined(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Join codes with their scales. Raises LookupError for codes without."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.dtype in CODES:
            scales = tensors[f"{name}{optimizer_state.SCALES}"]
            if scales.shape != optimizer_state.scales_shape(tensor.shape):
                raise LookupError(f"{name} and its scales have no common shape")
            found[name] = CodedTensor(tensor.file, name, tensor.dtype, tensor.shape, tensor.segments, scales=scales)
        elif not name.endswith(optimizer_state.SCALES):
            found[name] = tensor
    return found


def stored_size(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Compute a tensor's bytes in a file; None for an unknown type."""
    known = STORAGE | CODES
    return prod(shape) * known[dtype].itemsize if dtype in known else None
