"""Parquet files as rows of plain Python values."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files

SUFFIX = ".parquet"


def read_rows(path: str | Path) -> list[dict[str, Any]]:
    """Read all rows of a file; UserError when it is missing or damaged."""
    import pyarrow  # takes a quarter of a second, which only parquet files are worth
    from pyarrow import parquet

    try:
        return parquet.read_table(path).to_pylist()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, pyarrow.ArrowException) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise UserError(f"{path}: is not a parquet file that can be read ({reason}).") from None


def write_rows(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same columns; UserError when that fails."""
    import pyarrow
    from pyarrow import parquet

    path = Path(path)
    table = pyarrow.Table.from_pylist([dict(row) for row in rows])
    with atomic_files(path.parent) as stage:
        parquet.write_table(table, stage / path.name)
