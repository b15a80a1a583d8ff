"""Rows of JSONL, JSON array and parquet files, each with its origin."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files
from mindrlhf.files.json import parse_json
from mindrlhf.files.text import read_text
from mindrlhf.hub.datasets import dataset_files
from mindrlhf.hub.names import is_id

PARQUET = ".parquet"
JSON = (".jsonl", ".json")


@dataclass(frozen=True)
class SourceRow:
    """JSON object and its place: `train.jsonl, line 12`."""

    values: dict[str, Any]
    where: str


def is_source(path: str | Path) -> bool:
    """Test for rows by name: a file, a folder, or a hub's dataset."""
    return Path(path).suffix in (*JSON, PARQUET) or _dataset(path) is not None


def _dataset(path: str | Path) -> tuple[str, str] | None:
    """Return a folder or id, and the split after its colon; None for files."""
    name, _, split = str(path).partition(":")
    return (name, split) if Path(name).is_dir() or is_id(name) else None


def read_source(path: str | Path) -> list[SourceRow]:
    """Read all rows of a file, a folder or a hub's dataset.

    A folder gives the rows of its JSONL files, sorted by name. A folder without these, and a dataset's id, give the
    split `train`, or the split named after a colon: `openai/gsm8k:test`. UserError, with file and line, for a file that
    is missing, empty, not UTF-8, or not JSON objects.
    """
    if dataset := _dataset(path):
        name, split = dataset
        files = [] if split else sorted(Path(name).glob("*.jsonl"))
        return [row for file in files or dataset_files(name, split or "train") for row in read_source(file)]
    path = Path(path)
    if path.suffix == PARQUET:
        rows = [SourceRow(row, f"{path}, row {index}") for index, row in enumerate(read_parquet(path))]
    else:
        rows = _read_json(path)
    if not rows:
        raise UserError(f"{path}: holds no rows.")
    return rows


def _read_json(path: Path) -> list[SourceRow]:
    text = read_text(path, "a JSON or JSONL file").removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        return [_row(values, f"{path}, item {number}") for number, values in enumerate(_parsed(text, path, 1), 1)]
    # Not splitlines(): U+2028 and similar characters may be inside a JSON string.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [_row(_parsed(line, path, number), f"{path}, line {number}") for number, line in lines]


def _parsed(text: str, path: Path, line: int) -> Any:
    """Parse JSON that begins in this line of a file; UserError names its fault."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f"{path}, line {line + error.lineno - 1}"
        raise UserError(f"{place}: not JSON ({error.msg}, column {error.colno}).") from None
    except ValueError as error:
        raise UserError(f"{path}, line {line}: not JSON ({error}).") from None


def given_rows(rows: Iterable[Mapping[str, Any]], name: str) -> list[SourceRow]:
    """Take rows of the calling program; `name` is the dataset's in messages. UserError."""
    found = [SourceRow(row, f"{name}, row {number}") for number, row in enumerate(rows)]
    for row in found:
        if not isinstance(row.values, Mapping):
            raise UserError(f"{row.where}: should be a mapping of columns, and is {row.values!r:.40}.")
    if not found:
        raise UserError(f"{name}: holds no rows.")
    return [SourceRow(dict(row.values), row.where) for row in found]


def _row(values: Any, where: str) -> SourceRow:
    """Check that a row is an object that can be written as UTF-8."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: should be a JSON object, and is {json.dumps(values)[:40]}.")
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: holds half of a surrogate pair, which is no character; remove it.") from None
    return SourceRow(values, where)


def _arrow(path: str | Path) -> tuple[ModuleType, ModuleType]:
    """Import pyarrow and its parquet; UserError when they do not fit NumPy.

    It takes a quarter of a second, and is needed for parquet files only.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        found = f"{path}: pyarrow, which reads parquet, cannot be imported ({str(error).splitlines()[0].rstrip('.')})"
        raise UserError(f"{found}; install one for NumPy 1: pip install 'pyarrow<26' 'pandas<3.1'.") from None


def read_parquet(path: str | Path) -> list[dict[str, Any]]:
    """Read all rows of a file; UserError when it is missing or damaged."""
    pyarrow, parquet = _arrow(path)
    try:
        return parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"{path}: is not a parquet file that can be read ({reason}).") from None


def write_parquet(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns; UserError when that fails."""
    pyarrow, parquet = _arrow(path)
    path = Path(path)
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    with atomic_files(path.parent) as stage:
        parquet.write_table(table, stage / path.name)
