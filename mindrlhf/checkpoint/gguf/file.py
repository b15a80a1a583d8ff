"""GGUF files: metadata, and tensors that are read on demand.

The reader of the package `gguf` is not used: it follows a damaged length without an end, and takes seconds for a
vocabulary. Each length is compared with the file here before anything is read or allocated.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mindrlhf.errors import UserError
from mindrlhf.files.text import reading

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes; the default
MOST_ALIGNMENT = 1 << 16
# Types of tensors that are read, by the format's numbers.
TYPES = {
    int(one): one
    for one in map(
        GGMLQuantizationType.__getitem__,
        ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"],
    )
}
# Types of values -> their NumPy types; text and lists are apart.
NUMBERS = dict(enumerate(("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")))
TEXT, LIST = 8, 9
LEAST_VALUE = 13  # bytes of the shortest value with its name
LEAST_TENSOR = 32  # bytes of the shortest row of a tensor
MOST_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Tensor of a GGUF file, not loaded.

    type: of its blocks. shape: in NumPy's order. offset, nbytes: its place in the file.
    """

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """Content of a GGUF file: metadata by key, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str) -> np.ndarray:
        """Read a tensor as a new float32 array, as the package `gguf` dequantises it."""
        tensor = self.tensors[name]
        with reading(self.path):
            raw = np.fromfile(self.path, np.uint8, tensor.nbytes, offset=tensor.offset)
        if raw.size < tensor.nbytes:
            raise UserError(f"{self.path}: has become shorter while it was read; try again.")
        with np.errstate(all="ignore"):  # scales of a damaged block; the reader of weights refuses what they make
            array = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.type)
        return np.ascontiguousarray(array, np.float32).reshape(tensor.shape)

    @cached_property
    def types(self) -> dict[str, int]:
        """Count the weights of each type, the most frequent first."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.type.name] = counts.get(tensor.type.name, 0) + prod(tensor.shape)
        return dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def read_gguf(path: Path) -> GgufFile:
    """Read and check the head of a GGUF file. Raises UserError."""
    try:
        with reading(path), path.open("rb") as file:
            first = file.read(8)
            _check_kind(path, first)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _parsed(path, _Cursor(content))
    except (ValueError, struct.error, OverflowError) as error:
        raise UserError(f"{path}: the GGUF file is damaged ({error}); get it again.") from error


class _Cursor:
    """Place in the bytes of a file."""

    def __init__(self, content: mmap.mmap):
        self.content = content
        self.size = len(content)
        self.at = 8

    def take(self, count: int, what: str) -> bytes:
        """Read bytes; ValueError beyond the end."""
        if count > self.size - self.at:
            raise ValueError(f"{what} needs {count:,} bytes at byte {self.at:,}, and the file has {self.size:,}")
        self.at += count
        return self.content[self.at - count : self.at]

    def number(self, kind: str, what: str) -> Any:
        """Read a number of a NumPy type."""
        return self.numbers(kind, 1, what)[0]

    def numbers(self, kind: str, count: int, what: str) -> list:
        """Read numbers; a float32 becomes the shortest decimal that rounds to it."""
        dtype = np.dtype(kind)
        found = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        return [float(str(value)) for value in found] if kind == "<f4" and count == 1 else found.tolist()

    def text(self, what: str) -> str:
        """Read a text with its length."""
        return self.take(self.number("<u8", what), what).decode("utf-8")

    def count(self, least: int, what: str) -> int:
        """Read a number of items of at least `least` bytes each.

        ValueError if they do not fit into the rest of the file.
        """
        count = self.number("<u8", what)
        if count * least > self.size - self.at:
            raise ValueError(f"{count:,} {what} do not fit into a file of {self.size:,} bytes")
        return count

    def value(self, what: str) -> Any:
        """Read a value of metadata with its type."""
        kind = self.number("<u4", what)
        if kind == TEXT:
            return self.text(what)
        if kind == LIST:
            return self.items(what)
        return self.number(_number_type(kind, what), what)

    def items(self, what: str) -> list:
        """Read a list of numbers or texts."""
        kind = self.number("<u4", what)
        if kind == TEXT:
            return [self.text(what) for _ in range(self.count(8, f"entries of {what}"))]
        numbers = _number_type(kind, what)
        return self.numbers(numbers, self.count(np.dtype(numbers).itemsize, f"entries of {what}"), what)


def _number_type(kind: int, what: str) -> str:
    found = NUMBERS.get(kind)
    if found is None:
        raise ValueError(f"{what:.80} has a value of the unknown type {kind}")
    return found


def _check_kind(path: Path, first: bytes) -> None:
    """Refuse files of other kinds, and of versions that are not read."""
    if first == b"version ":
        raise UserError(f"{path}: this is a Git LFS pointer and not the model; run `git lfs pull`.")
    if first[:4] != MAGIC or len(first) < 8:
        raise UserError(f"{path}: does not begin as a GGUF file; give a model in GGUF or Hugging Face's format.")
    version = int.from_bytes(first[4:], "little")
    if version not in VERSIONS:
        kind = f"version {version}" if version < 1 << 16 else "a big-endian machine"
        raise UserError(f"{path}: is a GGUF file of {kind}, and versions 2 and 3 are read; convert it again.")


def _parsed(path: Path, cursor: _Cursor) -> GgufFile:
    tensors = cursor.count(LEAST_TENSOR, "tensors")
    values = cursor.count(LEAST_VALUE, "values")
    metadata: dict[str, Any] = {}
    for _ in range(values):
        key = cursor.text("the name of a value")
        if key in metadata:
            raise ValueError(f"{key:.80} is there twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= MOST_ALIGNMENT:
        raise ValueError(f"general.alignment is {alignment!r:.80}")
    rows = [_row(path, cursor) for _ in range(tensors)]
    found = {tensor.name: tensor for tensor in _placed(rows, cursor, alignment)}
    if len(found) < len(rows):
        raise ValueError("two tensors have one name")
    return GgufFile(path, metadata, found)


def _row(path: Path, cursor: _Cursor) -> GgufTensor:
    """Read the description of one tensor, with its offset behind the head."""
    name = cursor.text("the name of a tensor")
    dims = cursor.number("<u4", name)
    if not 1 <= dims <= MOST_DIMS:
        raise ValueError(f"{name:.80} has {dims} dimensions")
    shape = tuple(reversed(cursor.numbers("<u8", dims, name)))
    kind = cursor.number("<u4", name)
    if not all(shape):
        raise ValueError(f"{name:.80} has the shape {list(shape)}")
    if kind not in TYPES:
        known = ", ".join(one.name for one in TYPES.values())
        other = GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else f"number {kind}"
        raise UserError(f"{path}: tensor {name:.80} has the type {other}, and {known} are read; quantise it as Q8_0.")
    block, nbytes = GGML_QUANT_SIZES[TYPES[kind]]
    if shape[-1] % block:
        raise ValueError(f"rows of {name:.80} have {shape[-1]} numbers, and blocks of {block}")
    size = prod(shape) // block * nbytes
    return GgufTensor(name, TYPES[kind], shape, cursor.number("<u8", name), size)


def _placed(rows: list[GgufTensor], cursor: _Cursor, alignment: int) -> Iterator[GgufTensor]:
    """Yield tensors with their places in the file.

    They follow each other, each at a multiple of the alignment; ValueError otherwise.
    """
    start = -(-cursor.at // alignment) * alignment
    expected = 0
    for row in rows:
        if row.offset != expected:
            raise ValueError(f"{row.name:.80} begins at byte {row.offset:,} in place of {expected:,}")
        if start + row.offset + row.nbytes > cursor.size:
            end = start + row.offset + row.nbytes
            raise ValueError(f"{row.name:.80} ends at byte {end:,}, and the file has {cursor.size:,}: it is truncated")
        yield GgufTensor(row.name, row.type, row.shape, start + row.offset, row.nbytes)
        expected += -(-row.nbytes // alignment) * alignment
