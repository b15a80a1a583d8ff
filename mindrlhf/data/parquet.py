"""Parquet files: rows with Python's values, and writing of rows."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.data.plain import plain
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files

PARQUET = ".parquet"
ROWS_PER_BATCH = 1024
LEFT_OUT = "is left out"

_log = logging.getLogger(__name__)


def read_parquet(path: str | Path, limit: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a file, or the first `limit`.

    Nanoseconds become microseconds, text that is not UTF-8 becomes bytes, an unknown time zone becomes UTC. A column
    with values that Python does not have, years above 9999 say, is left out. A warning names each such column.
    UserError for a file that is missing or damaged.
    """
    pyarrow, parquet = _arrow(path)
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{path}: has two columns called {twice!r}; rename one of them.")
            for batch in file.iter_batches(min(limit or ROWS_PER_BATCH, ROWS_PER_BATCH)):
                columns = [_values(pyarrow, *named, notes) for named in zip(names, batch, strict=True)]
                rows += [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
                if limit is not None and len(rows) >= limit:
                    break
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file.") from None
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"{path}: is not a parquet file that can be read ({reason}).") from None
    left_out = [name for name, note in notes.items() if note.startswith(LEFT_OUT)]
    for name, note in notes.items():
        _log.warning("%s: column %r %s", path, name, note)
    return [{name: value for name, value in row.items() if name not in left_out} for row in rows[:limit]]


def _values(pyarrow: ModuleType, name: str, column: Any, notes: dict[str, str]) -> list[Any]:
    """Convert a column to Python's values, and note where they are not the file's."""
    kind = _readable(pyarrow, column.type)
    if kind != column.type:
        try:
            column = column.cast(kind)
        except pyarrow.ArrowInvalid:
            column = column.cast(kind, safe=False)
            notes[name] = "has nanoseconds, of which microseconds are kept"
    try:
        return plain(column.to_pylist())
    except UnicodeDecodeError:
        notes[name] = "has texts that are not UTF-8, and are given as bytes"
        kind = _readable(pyarrow, column.type, texts=pyarrow.large_binary())
        return _text_or_bytes(plain(column.cast(kind).to_pylist()))
    except LookupError:
        notes[name] = "has a time zone that is not known here, and is given in UTC"
        return plain(column.cast(_readable(pyarrow, column.type, zone="UTC")).to_pylist())
    except (ValueError, OverflowError, TypeError, NotImplementedError) as error:
        notes[name] = f"{LEFT_OUT}: Python has no such value ({' '.join(str(error).split())[:100].rstrip('.')})"
    return [None] * len(column)


def _text_or_bytes(value: Any) -> Any:
    """Decode the bytes in a value that are UTF-8."""
    if isinstance(value, list):
        return [_text_or_bytes(one) for one in value]
    if isinstance(value, dict):
        return {key: _text_or_bytes(one) for key, one in value.items()}
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _readable(pyarrow: ModuleType, kind: Any, zone: str | None = None, texts: Any = None) -> Any:
    """Return a type with microseconds for nanoseconds, also inside of others.

    zone: replaces other time zones; texts: type that replaces text. None keeps them.
    """
    types = pyarrow.types
    inner = partial(_readable, pyarrow, zone=zone, texts=texts)
    if types.is_string(kind) or types.is_large_string(kind):
        return texts or kind
    if types.is_timestamp(kind):
        return pyarrow.timestamp("us" if kind.unit == "ns" else kind.unit, kind.tz and (zone or kind.tz))
    for is_kind, of_unit in ((types.is_time64, pyarrow.time64), (types.is_duration, pyarrow.duration)):
        if is_kind(kind) and kind.unit == "ns":
            return of_unit("us")
    if types.is_list(kind):
        return pyarrow.list_(inner(kind.value_type))
    if types.is_large_list(kind):
        return pyarrow.large_list(inner(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(inner(kind.value_type), kind.list_size)
    if types.is_struct(kind):
        return pyarrow.struct([(kind.field(place).name, inner(kind.field(place).type)) for place in range(len(kind))])
    if types.is_map(kind):
        return pyarrow.map_(inner(kind.key_type), inner(kind.item_type))
    return inner(kind.value_type) if types.is_dictionary(kind) else kind


def _arrow(path: str | Path) -> tuple[ModuleType, ModuleType]:
    """Import pyarrow and its parquet; UserError when they do not fit NumPy.

    It takes a quarter of a second, and is needed for parquet files only.
    """
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        found = f"{path}: pyarrow, which reads parquet, cannot be imported ({str(error).splitlines()[0].rstrip('.')})"
        raise UserError(f"{found}; install one for NumPy 1: pip install 'pyarrow<26' 'pandas<3.1'.") from None


def write_parquet(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns; UserError when that fails."""
    pyarrow, parquet = _arrow(path)
    path = Path(path)
    try:
        table = pyarrow.Table.from_pylist([dict(row) for row in rows])
        with atomic_files(path.parent) as stage:
            parquet.write_table(table, stage / path.name)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(
            f"{path}: parquet cannot hold these columns, whose values should be alike ({reason})."
        ) from None
