"""Rows with their images, of files and of the calling program."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from mindrlhf.data.source import IMAGE_COLUMNS, SourceRow, given_rows, is_source, read_source, source_names
from mindrlhf.errors import UserError

TALKS = ("messages", "prompt", "completion", "question", "conversations")
"""Columns of messages, among whose parts a program's rows may have images."""


@dataclass(frozen=True)
class PictureRow:
    """Row of a source, and the images of its columns.

    folder: where the paths of its images begin. objects: columns of images as the calling program gave them; None for a
    file's row.
    """

    row: SourceRow
    images: list[Any]
    folder: Path
    objects: Mapping[str, Any] | None = None

    @property
    def where(self) -> str:
        """Place of the row, for messages."""
        return self.row.where

    @property
    def texts(self) -> dict[str, Any]:
        """Values of the other columns."""
        return _texts_of(self.row.values)


def picture_rows(
    path: str | Path,
    given: Sequence[Mapping[str, Any]] | None = None,
    split: str | None = None,
    limit: int | None = None,
) -> list[PictureRow]:
    """Read the rows of one source or several; none of a MindRecord.

    limit: number of first rows. given: rows of the calling program, which may have objects of Pillow.
    """
    if given is not None:
        return _given(given, path)[:limit]
    found: list[PictureRow] = []
    for name in source_names(path):
        folder = Path(name) if Path(name).is_dir() else Path(name).parent
        rows = read_source(name, limit, split) if is_source(name) else []
        found += [PictureRow(row, images_of(row.values, row.where), folder) for row in rows]
    return found[:limit]


def _given(given: Sequence[Mapping[str, Any]], path: str | Path) -> list[PictureRow]:
    columns = [[key for key in IMAGE_COLUMNS if key in row] if isinstance(row, Mapping) else [] for row in given]
    apart = [{key: row[key] for key in keys} for keys, row in zip(columns, given, strict=True)]
    texts = [_texts_of(row) if isinstance(row, Mapping) else row for row in given]
    rows = given_rows(texts, str(path), dict.fromkeys(TALKS, (Image.Image, Path)))
    folder = Path(path).parent
    return [PictureRow(row, images_of(own, row.where), folder, own) for own, row in zip(apart, rows, strict=True)]


def _texts_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that are no images."""
    return {key: value for key, value in values.items() if key not in IMAGE_COLUMNS}


def images_of(values: Mapping[str, Any], where: str) -> list[Any]:
    """Return the images of a row's columns."""
    several, one = (values.get(key) for key in IMAGE_COLUMNS)
    if several is not None and not isinstance(several, list | tuple):
        raise UserError(f"{where}: images should be a list, and is {several!r:.40}; a single one is called image.")
    if several and one is not None:
        raise UserError(f"{where}: has both images and image; give one of them.")
    return list(several or ()) or ([] if one is None else [one])
