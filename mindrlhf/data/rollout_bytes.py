"""Rows of rollouts (`rollout_record.to_rows`) as bytes and back, bit for bit: an .npz archive."""

import json
import zipfile
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from mindrlhf.data.rollout_record import SCHEMA

_ARRAYS = [name for name, kind in SCHEMA.items() if "shape" in kind]


def pack_rows(rows: Sequence[dict[str, Any]]) -> bytes:
    """The rows as one archive: each array column in one piece with its lengths, everything else as JSON."""
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in _ARRAYS if rows}
    lengths = {f"{name}/lengths": np.array([len(row[name]) for row in rows]) for name in _ARRAYS}
    plain = json.dumps([{name: row[name] for name in SCHEMA if name not in _ARRAYS} for row in rows])
    buffer = BytesIO()
    np.savez(buffer, plain=np.frombuffer(plain.encode(), np.uint8), **arrays, **lengths)
    return buffer.getvalue()


def unpack_rows(content: bytes) -> list[dict[str, Any]]:
    """The inverse of `pack_rows`. Raises ValueError when the bytes are not what it gave."""
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            plain = json.loads(archive["plain"].tobytes())
            if not plain:
                return []
            ends = {name: np.cumsum(archive[f"{name}/lengths"])[:-1] for name in _ARRAYS}
            columns = {name: np.split(archive[name], ends[name]) for name in _ARRAYS}
    except (OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(str(error)) from error
    return [row | {name: columns[name][index] for name in _ARRAYS} for index, row in enumerate(plain)]
