"""Rows of JSONL, JSON array and parquet files, each with its origin."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mindrlhf.data.parquet import PARQUET, read_parquet
from mindrlhf.data.plain import plain
from mindrlhf.errors import UserError
from mindrlhf.files.json import parse_json
from mindrlhf.files.text import read_text
from mindrlhf.hub.datasets import dataset_files
from mindrlhf.hub.names import is_id

JSON = (".jsonl", ".json")
MESSAGE_KEYS = ("prompt", "messages", "conversations")  # lists of objects that are one row
IMAGE_COLUMNS = ("images", "image")
SEPARATOR = ","  # between the names of several sources


@dataclass(frozen=True)
class SourceRow:
    """JSON object and its place: `train.jsonl, line 12`."""

    values: dict[str, Any]
    where: str


def refuse_images(values: Mapping[str, Any], where: str) -> None:
    """Refuse a row with images where text alone is read."""
    if key := next((key for key in IMAGE_COLUMNS if values.get(key)), None):
        found = f"{where}: has images in the column {key!r}, and text is read alone"
        raise UserError(f"{found}; give the file itself to a model that sees, or leave the column out.")


def read_sources(names: str | Path, limit: int | None = None, split: str | None = None) -> list[SourceRow]:
    """Read the rows of one source, or of several in order.

    names: a file, a folder or a hub's dataset each, with commas between them.
    """
    return [row for part in source_names(names) for row in read_source(part, limit, split)][:limit]


def source_names(names: str | Path) -> list[str | Path]:
    """Divide the names of several sources; see `read_sources`."""
    parts = str(names).split(SEPARATOR)
    several = len(parts) > 1 and not Path(names).exists() and all(map(is_source, parts))
    return [*parts] if several else [names]


def is_source(path: str | Path) -> bool:
    """Test for rows by name: a file, a folder, or a hub's dataset."""
    return Path(path).suffix in (*JSON, PARQUET) or _dataset(path) is not None


def _dataset(path: str | Path) -> tuple[str, str] | None:
    """Return a folder or id, and the split after its colon; None for files."""
    name, _, split = str(path).partition(":")
    return (name, split) if Path(name).is_dir() or is_id(name) else None


def read_source(path: str | Path, limit: int | None = None, split: str | None = "train") -> list[SourceRow]:
    """Read the rows of a file, a folder or a hub's dataset.

    limit: number of first rows to read. split: of a folder or a dataset's id, unless one is named after a colon,
    `openai/gsm8k:test`; None is the only one (see `dataset_files`). UserError, with file and line, for a file that is
    missing, empty, not UTF-8, or not JSON objects.
    """
    if dataset := _dataset(path):
        name, named = dataset
        rows: list[SourceRow] = []
        for file in dataset_files(name, named or split):
            if limit is None or len(rows) < limit:
                rows += read_source(file, limit and limit - len(rows))
        return rows
    path = Path(path)
    if path.suffix == PARQUET:
        found = enumerate(read_parquet(path, limit))
        rows = [SourceRow(_of_table(row), f"{path}, row {index}") for index, row in found]
    else:
        rows = _read_json(path)[:limit]
    if not rows:
        raise UserError(f"{path}: holds no rows.")
    return rows


def _read_json(path: Path) -> list[SourceRow]:
    text = read_text(path, "a JSON or JSONL file").removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        return [_row(values, f"{path}, item {number}") for number, values in enumerate(_parsed(text, path, 1), 1)]
    # Not splitlines(): U+2028 and similar characters may be inside a JSON string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    rows = [_row(_parsed(line, path, number), f"{path}, line {number}") for number, line in lines]
    if path.suffix == ".json" and len(rows) == len(rows[0].values if rows else ()) == 1:
        ((key, inner),) = rows[0].values.items()
        if key not in MESSAGE_KEYS and isinstance(inner, list) and any(isinstance(one, dict) for one in inner):
            raise UserError(f"{path}: is one object with its rows under {key!r}; write the rows as a JSON array.")
    return rows


def _parsed(text: str, path: Path, line: int) -> Any:
    """Parse JSON that begins in this line of a file; UserError names its fault."""
    try:
        return parse_json(text, rows=True)
    except json.JSONDecodeError as error:
        place = f"{path}, line {line + error.lineno - 1}"
        raise UserError(f"{place}: not JSON ({error.msg}, column {error.colno}).") from None
    except ValueError as error:
        raise UserError(f"{path}, line {line}: not JSON ({error}).") from None


def given_rows(
    rows: Iterable[Mapping[str, Any]], name: str, kept: Mapping[str, tuple[type, ...]] = MappingProxyType({})
) -> list[SourceRow]:
    """Take rows of the calling program; `name` is the dataset's in messages.

    kept: column -> classes whose objects stay as they are in it. Raises UserError.
    """
    found = []
    for number, row in enumerate(rows):
        where = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise UserError(f"{where}: should be a mapping of columns, and is {row!r:.40}.")
        found.append(SourceRow(_of_table(_plain_row(row, where, kept)), where))
    if not found:
        raise UserError(f"{name}: holds no rows.")
    return found


def _plain_row(row: Mapping[str, Any], where: str, kept: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Convert a row's values to Python's; UserError names a column that has none."""
    values = {}
    for key, value in row.items():
        try:
            values[str(key)] = plain(value, kept.get(key, ()))
        except ValueError as error:
            seen = "; images are for a model that sees" if key in IMAGE_COLUMNS else ""
            raise UserError(f"{where}: column {str(key)!r} {error}{seen}.") from None
    return values


def _of_table(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out nulls in the conversations and tools of a table's row.

    A table gives each object the keys of all objects in its column, and they are null where an object lacks them.
    """
    return {key: _without_nulls(value) if key == "tools" or _talks(value) else value for key, value in values.items()}


def _talks(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) and "role" in item for item in value)


def _without_nulls(value: Any) -> Any:
    """Leave out the keys of nested objects whose values are null."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _row(values: Any, where: str) -> SourceRow:
    """Check that a row is an object that can be written as UTF-8."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: should be a JSON object, and is {json.dumps(values)[:40]}.")
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds half of a surrogate pair, which is no character; remove it.") from None
    return SourceRow(values, where)
