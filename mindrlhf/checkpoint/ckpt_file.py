"""MindSpore's `.ckpt` format, read without loading it and written tensor by tensor.

A file is one protobuf message: repeated field 1, each {1: name, 2: {1: dims (a varint each), 2: type name, 3: bytes}},
where a large tensor is cut into consecutive entries of the same name. `mindspore.load_checkpoint` holds a whole file in
memory twice. Encrypted files cannot be read; the checksum that MindSpore appends on request is skipped.
"""

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.stored_tensor import StoredDtype, StoredTensor, encode, stored_size
from mindrlhf.errors import UserError
from mindrlhf.files.text import reading

_TYPE_NAMES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}
_PIECE_BYTES = 512 << 20  # MindSpore's own size of one entry
_CHECKSUM_MARK = b"crc_num"
_CHECKSUM_BYTES = 17

_VARINT, _BYTES = 0, 2  # wire types


def index_ckpt(path: Path) -> dict[str, StoredTensor]:
    """Index the tensors of a `.ckpt` file by name, without texts and maps."""
    tensors: dict[str, StoredTensor] = {}
    try:
        with reading(path), path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            end = len(data)
            if data[end - _CHECKSUM_BYTES : end].startswith(_CHECKSUM_MARK):
                end -= _CHECKSUM_BYTES
            for field, span in _fields(data, 0, end):
                if field != 1:
                    raise ValueError(f"unknown field {field}")
                entry = _entry(path, data, *span)
                if entry and entry.name in tensors:
                    earlier = tensors[entry.name]
                    entry = replace(earlier, segments=earlier.segments + entry.segments)
                if entry:
                    tensors[entry.name] = entry
    except (ValueError, TypeError) as error:  # also an empty file, which cannot be mapped; a number in place of bytes
        raise UserError(f"{path}: not a MindSpore .ckpt, or damaged or truncated ({error}); get it again.") from error
    for tensor in tensors.values():
        needed = stored_size(tensor.dtype, tensor.shape)
        found = sum(nbytes for _, nbytes in tensor.segments)
        if needed is not None and needed != found:
            raise UserError(f"{path}: tensor {tensor.name} has {found} bytes and needs {needed}; get the file again.")
    return tensors


def write_ckpt(
    path: Path, tensors: Iterable[tuple[str, np.ndarray]], dtype: StoredDtype | Mapping[str, StoredDtype]
) -> None:
    """Write (name, floating-point array) pairs one at a time; not atomic by itself."""
    with path.open("wb") as file:
        for name, array in tensors:
            stored = dtype if isinstance(dtype, str) else dtype[name]
            content = memoryview(encode(array, stored, name).reshape(-1).view(np.uint8))
            described = b"".join(b"\x08" + _varint(size) for size in array.shape)
            described += _field(2, len(_TYPE_NAMES[stored])) + _TYPE_NAMES[stored].encode()
            for start in range(0, len(content), _PIECE_BYTES):
                piece = content[start : start + _PIECE_BYTES]
                tensor = described + _field(3, len(piece))
                value = _field(1, len(name.encode())) + name.encode() + _field(2, len(tensor) + len(piece)) + tensor
                file.write(_field(1, len(value) + len(piece)) + value)
                file.write(piece)


def _entry(path: Path, data: mmap.mmap, start: int, end: int) -> StoredTensor | None:
    """Read one entry as a one-segment tensor; None unless it is plain."""
    entry = dict(_fields(data, start, end))
    if 2 not in entry:
        return None
    name = data[slice(*entry.get(1, (0, 0)))].decode()
    fields = list(_fields(data, *entry[2]))
    dims = [int(value) for field, value in fields if field == 1]
    rest = dict(fields)
    if 3 not in rest:
        raise ValueError(f"incomplete tensor {name}")
    dtype = data[slice(*rest.get(2, (0, 0)))].decode().lower()
    begin, stop = rest[3]
    shape = () if dims == [0] else tuple(dims)  # how MindSpore writes a number without dimensions
    return StoredTensor(path, name, dtype, shape, ((begin, stop - begin),))


def _fields(data: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, Any]]:
    """Yield (field number, value) in data[start:end]: a number, or (start, end) of bytes."""
    while start < end:
        key, start = _read_varint(data, start, end)
        value, start = _read_varint(data, start, end)
        if key & 7 == _BYTES:
            value, start = (start, start + value), start + value
        elif key & 7 != _VARINT:
            raise ValueError(f"field {key >> 3} is of the wrong kind")
        if start > end:
            raise ValueError(f"{start - end} bytes are missing at the end")
        yield key >> 3, value


def _read_varint(data: mmap.mmap, start: int, end: int) -> tuple[int, int]:
    """Read a varint to (number, position after it)."""
    value = 0
    for position in range(start, min(start + 10, end)):
        value |= (data[position] & 0x7F) << (7 * (position - start))
        if data[position] < 0x80:
            return value, position + 1
    raise ValueError("a number without end")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(number: int, length: int) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(length)
