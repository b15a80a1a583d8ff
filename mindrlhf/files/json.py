"""JSON in files and texts: one reader and one writer."""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.text import read_text

MOST_LEVELS = 200  # of nested lists and groups: writers of values go no deeper
TOO_DEEP = f"lists and groups more than {MOST_LEVELS} levels deep"


def parse_json(text: str | bytes, rows: bool = False) -> Any:
    """Parse a JSON text; ValueError for bad syntax, deep nesting, or long numbers.

    rows: data of others, whose NaN is None, and whose groups may not have a key twice.
    """
    try:
        parsed = json.loads(text, parse_constant=_constant, object_pairs_hook=_group) if rows else json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except DuplicateKey:
        raise
    except ValueError:  # Python's limit, whose message is advice to programmers
        raise ValueError("a number with thousands of digits") from None
    level = [[parsed]]
    for _ in range(MOST_LEVELS + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [one for one in chain.from_iterable(inner) if isinstance(one, dict | list)]
        if not level:
            return parsed
    raise ValueError(TOO_DEEP)


class DuplicateKey(ValueError):
    """Key that a group has twice."""


def _group(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    group = dict(pairs)
    if len(group) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DuplicateKey(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return group


def _constant(name: str) -> float | None:
    """Return the value of NaN, Infinity and -Infinity, which Python writes."""
    return None if name == "NaN" else float(name)


def is_number(value: Any) -> bool:
    """Test that a JSON value is a number within float64; booleans are not."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


def is_whole(value: Any) -> bool:
    """Test that a JSON value is a whole number within float64; booleans are not."""
    return type(value) is int and is_number(value)


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a UTF-8 file; a UserError for anything else."""
    return _object(read_text(path, "a JSON file"), str(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file, except an unfinished last line."""
    try:
        lines = Path(path).read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give a JSONL file that a run has written") from error
    return [_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _object(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        content = parse_json(text)
    except ValueError as error:
        raise UserError(f"{where}: is not valid JSON ({error}); restore it.") from error
    if not isinstance(content, dict):
        raise UserError(f"{where}: a JSON object is needed, and this is a {type(content).__name__}.")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented UTF-8 JSON; not atomic by itself."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def json_line(fields: Mapping[str, Any]) -> bytes:
    """Format a line of strict JSON; NaN and infinities become null."""
    try:
        return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # whole numbers beyond 64 bits, halves of surrogate pairs
        return json.dumps(finite(fields)).encode() + b"\n"


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]], durable: bool = True) -> None:
    """Write a JSONL file atomically, a line for each row.

    durable: wait for the disk.
    """
    content = b"".join(map(json_line, rows))
    with atomic_file(path, durable) as temporary:
        temporary.write_bytes(content)


def finite(value: Any) -> Any:
    """Replace numbers that JSON cannot write (NaN, infinities) by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
