"""Tensors inside weight files, read on demand through a memory map."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.encoding import STORAGE, decode
from mindrlhf.errors import UserError


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file, not loaded.

    dtype: the stored type by its NumPy name. segments: (offset, size) in bytes, within the file; several when the
    format cuts a large tensor into pieces.
    """

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[tuple[int, int], ...]

    def read(self, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read the tensor, or the part `index`, as an own contiguous float32 array.

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
        return decode(flat.reshape(self.shape)[index or ()], self.dtype)

    def check(self, shape: tuple[int, ...] | None = None) -> None:
        """Raise a UserError for a type that cannot be read, or another shape."""
        here = f"{self.file}: tensor {self.name}"
        if self.dtype not in STORAGE:
            raise UserError(f"{here} is stored as {self.dtype}, and {', '.join(STORAGE)} can be read.")
        if shape not in (None, self.shape):
            raise UserError(
                f"{here} has shape {list(self.shape)} in place of {list(shape)}; give weights and layout of one model."
            )


def stored_size(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Compute a tensor's bytes in a file; None for an unknown type."""
    return prod(shape) * STORAGE[dtype].itemsize if dtype in STORAGE else None
