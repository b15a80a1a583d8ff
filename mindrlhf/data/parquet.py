"""Parquet files as rows of plain Python values. Needs pyarrow, which is no dependency of the package."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from mindrlhf.checkpoint.atomic import atomic_files
from mindrlhf.errors import UserError

SUFFIX = ".parquet"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a file, whatever its columns; UserError when it is missing or damaged, or pyarrow is."""
    arrow, parquet = _arrow(path)
    try:
        return parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, arrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"{path}: is not a parquet file that can be read ({reason}).") from None


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns, replacing an earlier file; UserError when it cannot be written."""
    arrow, parquet = _arrow(path)
    path = Path(path)
    table = arrow.Table.from_pylist([dict(row) for row in rows])
    with atomic_files(path.parent) as stage:
        parquet.write_table(table, stage / path.name)


def _arrow(path: str | Path) -> tuple[ModuleType, ModuleType]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(
            f"{path}: parquet files need the package pyarrow, which is not installed: run `pip install pyarrow`, or "
            "use JSONL."
        ) from None
