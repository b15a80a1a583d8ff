"""The safetensors format: header length (8 bytes), a JSON header, gapless tensors.

Read and written here rather than by the `safetensors` library because its NumPy side knows no bfloat16 and holds a
whole file in memory to write it; tests compare with the library in both directions.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mindrlhf.checkpoint.encoding import StoredDtype, encode
from mindrlhf.checkpoint.stored_tensor import StoredTensor, stored_size
from mindrlhf.errors import UserError

# The format's type names for what this suite reads and writes; other types are kept by the format's own name.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation


class Digest(Protocol):
    """Running checksum, as in `hashlib`."""

    def update(self, content: bytes | memoryview, /) -> None:
        """Add more bytes."""


def index_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Index the tensors of a file by name, from its header alone.

    Raises `UserError` for visible damage. Checked: the header fits the file and is valid, the tensors follow one
    another to the end of the file without gap or overlap, and each takes the bytes that its type and shape need.
    """
    size, header_bytes = _read_header(path)
    try:
        header = json.loads(header_bytes)
        header.pop("__metadata__", None)
        tensors = [_tensor(path, name, entry, 8 + len(header_bytes)) for name, entry in header.items()]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: the safetensors header is damaged ({error}); get the file again.") from error
    tensors.sort(key=lambda tensor: tensor.segments)
    end = 8 + len(header_bytes)
    for tensor in tensors:
        ((offset, nbytes),) = tensor.segments
        needed = stored_size(tensor.dtype, tensor.shape)
        if offset != end or (needed is not None and needed != nbytes):
            raise UserError(
                f"{path}: the safetensors header is damaged (the place of {tensor.name} does not fit its shape or its "
                "neighbours); get the file again."
            )
        end = offset + nbytes
    if end != size:
        state = "is truncated" if size < end else "has bytes that belong to no tensor"
        raise UserError(f"{path}: the file {state} ({size} bytes, {end} by its header); get it again.")
    return {tensor.name: tensor for tensor in tensors}


def write_safetensors(
    path: Path,
    layout: Sequence[tuple[str, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
    dtype: StoredDtype | Mapping[str, StoredDtype],
    metadata: dict[str, str],
    digest: Digest | None = None,
) -> None:
    """Write tensors one at a time, in the order of `layout`.

    layout: (name, shape) of every tensor. arrays: yields them in that order; floating-point, of any memory layout.
    dtype: of the stored numbers, one for all or name -> dtype. Not atomic by itself.
    digest: gets every byte of the file. Raises `ValueError` when an array is missing or has another shape than
    announced, `UserError` when a value does not fit its dtype.
    """
    dtypes = {name: dtype if isinstance(dtype, str) else dtype[name] for name, _ in layout}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, shape in layout:
        end = offset + stored_size(dtypes[name], shape)
        header[name] = {"dtype": _CODES[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8, as the format asks
    source = iter(arrays)
    with path.open("wb") as file:

        def write(content: bytes | memoryview) -> None:
            file.write(content)
            if digest is not None:
                digest.update(content)

        write(struct.pack("<Q", len(encoded)) + encoded)
        for name, shape in layout:
            array = next(source, None)
            if array is None or array.shape != shape:
                found = "nothing" if array is None else f"shape {array.shape}"
                raise ValueError(f"{path}: {name} should have shape {shape}, got {found}")
            write(encode(array, dtypes[name], name).data)


def _read_header(path: Path) -> tuple[int, bytes]:
    """Read (file size, header bytes)."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if start == b"version ":
                raise UserError(f"{path}: this is a Git LFS pointer and not the weights; run `git lfs pull`.")
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(
                    f"{path}: not a safetensors file, or truncated (its first bytes promise a header of {length} "
                    f"bytes, and the file has {size}); get it again."
                )
            return size, file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}).") from error


def _tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)) or end < begin:
        raise ValueError(f"impossible numbers for {name}")
    return StoredTensor(
        path, name, _DTYPES.get(entry["dtype"], entry["dtype"]), shape, ((data_start + begin, end - begin),)
    )
