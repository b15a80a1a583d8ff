"""Files of a hub's dataset by split and subset."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from mindrlhf.errors import UserError
from mindrlhf.files.text import some
from mindrlhf.hub.download import download, fetch_command, list_files
from mindrlhf.hub.names import is_id

SUFFIXES = (".parquet", ".jsonl", ".json")  # the first that a split has is taken
FOLDERS = ("data", "default", "train", "test", "validation")  # folders that name no subset
DEFAULTS = ("default", "main")  # subsets that are taken if there are several
# None is the dataset as its owner uploaded it; the other has parquet files that Hugging Face makes from it.
REVISIONS = (None, "refs/convert/parquet")
_SHARD = re.compile(r"-\d+-of-(\d+)\.\w+$")


def dataset_files(name: str, split: str = "train", subset: str | None = None) -> list[Path]:
    """Find the row files of a split in order, downloaded if needed.

    name: a dataset's id, or a folder with its files. subset: the folder in it that holds the split, if there are
    several ("configuration" in Hugging Face's words). Raises UserError.
    """
    there: list[str] = []
    for files, get in _places(name, split):
        if chosen := choose(name, files, split, subset):
            folder = get(chosen)
            return [folder / file for file in chosen]
        there += files
    rows = some([file for file in there if file.endswith(SUFFIXES)], 8) or "no such files"
    raise UserError(f"{name}: has no split {split!r} in parquet or JSONL files; there are {rows}.")


def _places(name: str, split: str) -> Iterator[tuple[list[str], Callable[[list[str]], Path]]]:
    """Yield (files available, function from chosen files to their local folder)."""
    if not is_id(name):
        yield _files_in(Path(name)), partial(_whole, Path(name))
        return
    for revision in REVISIONS:
        files = list_files(name, revision)
        if files is None:
            folder = download(name, "dataset", [f"*{split}*"])
            yield _files_in(folder), partial(_whole, folder)
            return
        yield files, partial(download, name, "dataset", revision=revision)


def _whole(folder: Path, chosen: list[str]) -> Path:
    return folder


def _files_in(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]


def choose(name: str, files: Iterable[str], split: str, subset: str | None) -> list[str]:
    """Choose the files of a split by their names; none if there are none.

    Raises UserError for a missing subset, several subsets without a choice, and missing parts.
    """
    rows = sorted(file for file in files if file.endswith(SUFFIXES))
    named = [file for file in rows if split in re.split(r"[^A-Za-z0-9]+", file)]
    if not named and split == "train" and len(rows) == 1:
        named = rows
    subsets = sorted({_subset(file) for file in named})
    chosen = subset or next((one for one in DEFAULTS if one in subsets), subsets[0] if len(subsets) == 1 else None)
    if subsets and chosen not in subsets:
        state = "has several subsets" if subset is None else f"has no subset {subset!r} with a split {split!r}"
        raise UserError(f"{name}: {state}; give --subset one of {some(subsets, 20)}.")
    of_subset = [file for file in named if _subset(file) == chosen]
    kinds = ([file for file in of_subset if file.endswith(suffix)] for suffix in SUFFIXES)
    found = next(filter(None, kinds), [])
    _check_whole(name, found)
    return found


def _subset(file: str) -> str:
    """Return the first folder that names a subset."""
    return next((part for part in PurePosixPath(file).parts[:-1] if part not in FOLDERS), "default")


def _check_whole(name: str, files: Sequence[str]) -> None:
    """Check that all parts `-00000-of-00002` are there: a cache may hold only some."""
    counts = [int(found[1]) for file in files if (found := _SHARD.search(file))]
    if counts and len(counts) < max(counts):
        right = f"fetch it whole with {fetch_command(name, 'dataset')}"
        raise UserError(f"{name}: {len(counts)} of its {max(counts)} files are in the hub's cache; {right}.")
