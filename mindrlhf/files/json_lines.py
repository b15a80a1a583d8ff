"""JSON Lines files, and output folders."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from mindrlhf.errors import UserError
from mindrlhf.files.json_text import parse_json


def make_folder(folder: Path) -> None:
    """Create `folder` with its parents; a UserError says why it fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot create the folder {folder} ({error.strerror}): give one that can be written"
        ) from error


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot write (NaN, infinities) by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def json_line(fields: Mapping[str, Any]) -> bytes:
    """Format one line of strictly valid JSON in UTF-8, with its newline.

    NaN and infinities become null.
    """
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # whole numbers beyond 64 bits, halves of surrogate pairs
        return json.dumps(finite(fields)).encode() + b"\n"


def json_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """Format the content of a JSONL file: a `json_line` for each row."""
    return b"".join(map(json_line, rows))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file.

    A last line without its newline is left out: its writer was cut off, or is at work.
    Raises UserError, naming file and line, for a file that is absent or a line that is not a JSON object.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give a JSONL file that a run has written") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not valid JSON ({error}); restore or remove that line") from error
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: found {type(row).__name__} where a JSON object belongs")
        rows.append(row)
    return rows
