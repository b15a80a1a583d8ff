"""The safetensors format: header length (8 bytes), a JSON header, gapless tensors.

The `safetensors` library is not used because its NumPy side knows no bfloat16 and holds a whole file in memory to write
it; tests compare with it in both directions.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.checkpoint.stored_tensor import StoredDtype, StoredTensor, encode, stored_size
from mindrlhf.errors import UserError
from mindrlhf.files.text import reading

# Other types are kept by the format's own name.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_CODES = {dtype: code for code, dtype in _DTYPES.items()} | {"int8": "I8", "uint8": "U8"}

_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's reference implementation


def index_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Index the tensors of a file by name, from its header alone.

    Raises `UserError` for a damaged header, and for tensors that do not fill the rest of the file without gaps.
    """
    try:
        with reading(path), path.open("rb") as file:
            size = path.stat().st_size
            first = file.read(8)
            if first == b"version ":
                raise UserError(f"{path}: this is a Git LFS pointer and not the weights; run `git lfs pull`.")
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(
                    f"{path}: not a safetensors file, or truncated (its first bytes promise a header of {length} "
                    f"bytes, and the file has {size}); get it again."
                )
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length
        tensors = {}
        for tensor in sorted((_tensor(path, *item, end) for item in header.items()), key=lambda each: each.segments):
            ((offset, nbytes),) = tensor.segments
            if offset != end or stored_size(tensor.dtype, tensor.shape) not in (None, nbytes):
                raise ValueError(f"the place of {tensor.name} does not fit its shape or its neighbours")
            end += nbytes
            tensors[tensor.name] = tensor
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: the safetensors header is damaged ({error}); get the file again.") from error
    if end != size:
        state = "is truncated" if size < end else "has bytes that belong to no tensor"
        raise UserError(f"{path}: the file {state} ({size} bytes, {end} by its header); get it again.")
    return tensors


def write_safetensors(
    path: Path,
    layout: Sequence[tuple[str, tuple[int, ...]]],
    arrays: Iterable[np.ndarray],
    dtype: StoredDtype | Mapping[str, str],
    metadata: dict[str, str],
    digest: Any = None,
) -> None:
    """Write tensors one at a time, in order; not atomic by itself.

    layout: (name, shape) of every tensor. arrays: in that order; floating-point, of any memory layout.
    dtype: of the stored numbers, one for all or name -> dtype; int8 and uint8 are for an optimizer's codes. digest: as
    in `hashlib`; gets every byte of the file.
    Raises `ValueError` for an array that is missing or of another shape, `UserError` for a value beyond its dtype.
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

        write(len(encoded).to_bytes(8, "little") + encoded)
        for name, shape in layout:
            array = next(source, None)
            if array is None or array.shape != shape:
                found = "nothing" if array is None else f"shape {array.shape}"
                raise ValueError(f"{path}: {name} should have shape {shape}, got {found}")
            write(encode(array, dtypes[name], name).data)


def _tensor(path: Path, name: str, entry: dict[str, Any], data_start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)) or end < begin:
        raise ValueError(f"impossible numbers for {name}")
    return StoredTensor(
        path, name, _DTYPES.get(entry["dtype"], entry["dtype"]), shape, ((data_start + begin, end - begin),)
    )
