"""File formats of response rows: JSONL, MindRecord, and bytes in between.

`records.rows` defines the rows; JSONL is for people, MindRecord for a replay.
All formats keep every number bit for bit. Files of versions before the columns of `rows.ADDED` are read too.
"""

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from mindrlhf.data.mindrecord import read_columns, read_schema, write_columns
from mindrlhf.errors import UserError
from mindrlhf.files.json import parse_json, write_json_lines
from mindrlhf.files.naming import TEXT, step_path
from mindrlhf.records.pictures import NOTHING
from mindrlhf.records.rows import ADDED, CARRIED, SCHEMA, Row, completed, experiences_of, text_row
from mindrlhf.token_arrays import RECORDED
from mindrlhf.types import Experience

_BYTES = {name for name, kind in SCHEMA.items() if kind["type"] == "bytes"}
_FLAGS = {array.name for array in RECORDED if array.column == "bytes"}
_ARRAYS = [name for name, kind in SCHEMA.items() if "shape" in kind or name in _BYTES]
_FLOATS = [name for name, kind in SCHEMA.items() if kind == {"type": "float64"}]
_PLAIN = [name for name in SCHEMA if name not in _ARRAYS]

FIRST_ROWS = 64
SHOWING_BYTES = 1 << 28
"""Most bytes of a row with pictures: MindSpore's largest."""

# The columns, except arrays, of each member of the archives that earlier versions packed.
_EARLIER = {
    "texts": ("finish_reason", "rewards_by_function", "fields"),
    "whole": ("step", "prompt_id", "sample_index", "seed", CARRIED),
    "floats": ("reward", "greedy_reward"),
    "lengths": ("prompt_ids", "response_ids", "behaviour_log_probs", "policy_log_probs"),
}


def write_text(folder: Path, step: int, rows: Iterable[Row]) -> Path:
    path = step_path(folder, step, TEXT)
    write_json_lines(path, map(text_row, rows), durable=False)
    return path


def write_record(path: str | Path, rows: Iterable[Row]) -> int:
    """Write rows as a MindRecord, atomically; returns their number.

    UserError for a row with more than `SHOWING_BYTES`, or 32 MiB where none of the first rows has pictures.
    """
    pending = iter(rows)
    first = list(islice(pending, FIRST_ROWS))
    shown = any(row["pictures"] != NOTHING for row in first)
    every = chain(first, pending)
    stored = ({name: row[name].tobytes() if name in _BYTES else row[name] for name in SCHEMA} for row in every)
    return write_columns(path, SCHEMA, stored, SHOWING_BYTES if shown else None)


def read_record_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a MindRecord in order. UserError as `read_columns`."""
    missing = (ADDED | {CARRIED}) - read_schema(path).keys()
    columns = read_columns(path, [name for name in (*SCHEMA, CARRIED) if name not in missing])
    for name in _FLOATS:
        columns[name] = [float(value) for value in columns[name]]  # MindSpore reads 1.0 as the whole number 1
    for name in _BYTES & columns.keys():
        numbers = [np.frombuffer(value, np.uint8) for value in columns[name]]
        columns[name] = [row > 0 for row in numbers] if name in _FLAGS else numbers
    return _rows(columns)


def read_record(path: str | Path) -> list[tuple[int, list[Experience]]]:
    """Read (step, its experiences with zero advantages) in order. UserError as `read_columns`."""
    try:
        steps = experiences_of(read_record_rows(path))
        for (earlier, _), (later, _) in pairwise(steps):
            if later <= earlier:
                raise ValueError(f"step {later} after step {earlier}")
        return steps
    except ValueError as error:
        found = f"{path}: holds no rollouts that a run wrote ({error})"
        raise UserError(f"{found}; give a file of --save_data_file.") from None


def pack(rows: Sequence[Row]) -> bytes:
    """Pack rows as an .npz archive: array columns, and JSON of all others."""
    arrays = {name: [row[name] for row in rows] for name in _ARRAYS}
    plain = {name: [row[name] for row in rows] for name in _PLAIN}  # NaN: null
    plain["lengths"] = {name: list(map(len, values)) for name, values in arrays.items()}
    parts = {name: np.concatenate(values) for name, values in arrays.items() if values}
    buffer = BytesIO()
    np.savez(buffer, plain=np.frombuffer(orjson.dumps(plain), np.uint8), **parts)
    return buffer.getvalue()


def unpack(content: bytes) -> list[dict[str, Any]]:
    """Invert `pack`. Raises ValueError for other bytes."""
    try:
        with np.load(BytesIO(content), allow_pickle=False) as archive:
            columns = parse_json(archive["plain"].tobytes()) if "plain" in archive else _earlier_columns(archive)
            for name, lengths in columns.pop("lengths").items():
                columns[name] = np.split(archive[name], np.cumsum(lengths)[:-1]) if lengths else []
        for name in _FLOATS:
            columns[name] = [np.nan if value is None else value for value in columns[name]]
        return _rows(columns)
    except (LookupError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(str(error)) from error


def _earlier_columns(archive: np.lib.npyio.NpzFile) -> dict[str, Any]:
    columns = dict(zip(_EARLIER["texts"], parse_json(archive["texts"].tobytes()), strict=True))
    for member in ("whole", "floats"):
        columns |= dict(zip(_EARLIER[member], archive[member].tolist(), strict=True))
    return columns | {"lengths": dict(zip(_EARLIER["lengths"], archive["lengths"].tolist(), strict=True))}


def _rows(columns: dict[str, list]) -> list[dict[str, Any]]:
    rows = zip(*columns.values(), strict=True)
    return [completed(dict(zip(columns, values, strict=True))) for values in rows]
