"""Columns of rollouts (`rollout_record.to_columns`) as bytes and back, bit for bit: an .npz archive."""

import json
import zipfile
import zlib
from collections.abc import Mapping
from io import BytesIO

import numpy as np

from mindrlhf.files.json import parse_json
from mindrlhf.records.rollout_record import SCHEMA

_ARRAYS = [name for name, kind in SCHEMA.items() if "shape" in kind]
_TEXTS = [name for name, kind in SCHEMA.items() if kind["type"] == "string"]
_WHOLE = [name for name, kind in SCHEMA.items() if kind["type"] == "int64"]
_FLOATS = [name for name in SCHEMA if name not in _ARRAYS + _TEXTS + _WHOLE]


def pack_columns(columns: Mapping[str, list]) -> bytes:
    """One archive: numbers in a table for each of their types, each array column in one piece, text as JSON."""
    parts = {name: np.concatenate(columns[name]) for name in _ARRAYS if columns[name]}
    parts["lengths"] = np.array([list(map(len, columns[name])) for name in _ARRAYS])
    parts["whole"] = np.array([columns[name] for name in _WHOLE], np.int64)
    parts["floats"] = np.array([columns[name] for name in _FLOATS], np.float64)
    texts = json.dumps([columns[name] for name in _TEXTS])
    buffer = BytesIO()
    np.savez(buffer, texts=np.frombuffer(texts.encode(), np.uint8), **parts)
    return buffer.getvalue()


def unpack_columns(content: bytes) -> dict[str, list]:
    """The inverse of `pack_columns`. Raises ValueError when the bytes are not what it gave."""
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            columns = dict(zip(_TEXTS, parse_json(archive["texts"].tobytes()), strict=True))
            columns |= dict(zip(_WHOLE + _FLOATS, archive["whole"].tolist() + archive["floats"].tolist(), strict=True))
            for name, lengths in zip(_ARRAYS, archive["lengths"], strict=True):
                columns[name] = np.split(archive[name], np.cumsum(lengths)[:-1]) if len(lengths) else []
    except (OSError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from error
    return {name: columns[name] for name in SCHEMA}
