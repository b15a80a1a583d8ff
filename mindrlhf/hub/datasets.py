"""Files of a dataset by split and subset, as `datasets` divides them."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from mindrlhf.errors import UserError
from mindrlhf.files.text import some
from mindrlhf.hub.dataset_card import CARD, Subset, files_of, read_subsets
from mindrlhf.hub.download import download, fetch_command, list_files
from mindrlhf.hub.names import is_id

SUFFIXES = (".parquet", ".jsonl", ".json")  # of a hub's dataset, the first that a split has is taken
NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
FOLDERS = ("data", "default", "train", "test", "validation")  # folders that name no subset
DEFAULTS = ("default", "main")  # subsets that are taken if there are several
# None is the dataset as its owner uploaded it; the other has parquet files that Hugging Face makes from it.
REVISIONS = (None, "refs/convert/parquet")
# Split -> words in the names of its files and folders.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SHARD = re.compile(r"-\d+-of-(\d+)\.\w+$")
_NAMED_SHARD = re.compile(r"data/([\w.]+)-\d{5}-of-\d{5}[^/]*")

Get = Callable[[Sequence[str]], Path]
"""Function from chosen files to their local folder."""


def dataset_files(name: str, split: str | None = "train", subset: str | None = None) -> list[Path]:
    """Find the row files of a split in order, downloaded if needed.

    name: a dataset's id, or a folder with its files. split: None is the only one. subset: the folder in it that holds
    the split, if there are several ("configuration" in Hugging Face's words). Splits and subsets are those of the
    dataset's card, if it lists them, else those that the files' names say; files that say nothing are the split
    `train`. Raises UserError, also for a file that may be of two splits.
    """
    there: list[str] = []
    for files, get in _places(name, split):
        rows = [file for file in files if file.endswith(SUFFIXES) and PurePosixPath(file).name not in NO_ROWS]
        subsets = read_subsets(get([CARD]) / CARD) if CARD in files else []
        splits = {split for one in subsets for split in one.splits} or {
            split for file in rows for split in splits_of(file)
        }
        if split is None and len(splits) > 1:
            raise UserError(f"{name}: has the splits {some(sorted(splits), 8)}; name one, {name}:{min(splits)} say.")
        wanted = split or next(iter(splits), "train")
        if chosen := _of_card(name, subsets, rows, wanted, subset) if subsets else choose(name, rows, wanted, subset):
            folder = get(chosen)
            return [folder / file for file in chosen]
        there += rows
    found = some(there, 8) or "no such files"
    raise UserError(f"{name}: has no split {split or 'train'!r} in parquet or JSONL files; there are {found}.")


def _places(name: str, split: str | None) -> Iterator[tuple[list[str], Get]]:
    """Yield (files available, function from chosen files to their local folder)."""
    if not is_id(name):
        yield _files_in(Path(name)), partial(_whole, Path(name))
        return
    for revision in REVISIONS:
        files = list_files(name, revision)
        if files is None:
            words = ("",) if split is None else SPLITS.get(split, (split,))
            folder = download(name, "dataset", [CARD, *(f"*{word}*" for word in words)])
            yield _files_in(folder), partial(_whole, folder)
            return
        yield files, partial(download, name, "dataset", revision=revision)


def _whole(folder: Path, chosen: Sequence[str]) -> Path:
    return folder


def _files_in(folder: Path) -> list[str]:
    """List a folder's files; hidden ones and those of Python are no data."""
    found = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file())
    return [file.as_posix() for file in found if not any(part.startswith((".", "__")) for part in file.parts)]


def _of_card(name: str, subsets: Sequence[Subset], files: Sequence[str], split: str, subset: str | None) -> list[str]:
    """Choose the files of a split as the dataset's card lists them."""
    names = [one.name for one in subsets if split in one.splits]
    if names:
        default = next((one.name for one in subsets if one.default and one.name in names), None)
        chosen = _one_subset(name, names, split, subset or default)
        patterns = next(one.splits[split] for one in subsets if one.name == chosen)
        return files_of(patterns, files)
    return []


def choose(name: str, files: Iterable[str], split: str, subset: str | None) -> list[str]:
    """Choose the files of a split by their names; none if there are none.

    Raises UserError for a missing subset, several subsets without a choice, missing parts, a file that may be of two
    splits, and a folder whose split is in several formats.
    """
    rows = sorted(file for file in files if file.endswith(SUFFIXES))
    splits = {file: splits_of(file, split) for file in rows}
    named = [file for file in rows if split in splits[file]]
    if doubtful := next((file for file in named if len(splits[file]) > 1), None):
        found = f"{doubtful} could be of the splits {some(splits[doubtful], 4)}"
        raise UserError(f"{name}: {found}; rename it, or name the files that you mean.")
    if not any(splits.values()) and split == "train":
        named = rows
    if not named:
        return []
    chosen = _one_subset(name, [_subset(file) for file in named], split, subset)
    of_subset = [file for file in named if _subset(file) == chosen]
    kinds = [kind for suffix in SUFFIXES if (kind := [file for file in of_subset if file.endswith(suffix)])]
    if len(kinds) > 1 and not is_id(name):
        raise UserError(f"{name}: has the split {split!r} in several formats, {some(of_subset, 4)}; name the files.")
    _check_whole(name, kinds[0])
    return kinds[0]


def _one_subset(name: str, names: Iterable[str], split: str, subset: str | None) -> str:
    """Choose one of the subsets that have a split."""
    subsets = sorted(set(names))
    chosen = subset or next((one for one in DEFAULTS if one in subsets), subsets[0] if len(subsets) == 1 else None)
    if chosen not in subsets:
        state = "has several subsets" if subset is None else f"has no subset {subset!r} with a split {split!r}"
        folder = "" if is_id(name) else ", or name its files"
        raise UserError(f"{name}: {state}; give `mindrlhf data` --subset one of {some(subsets, 20)}{folder}.")
    return chosen


def splits_of(file: str, other: str = "train") -> list[str]:
    """List the splits that a file's path says; `other` may have any name."""
    if shard := _NAMED_SHARD.fullmatch(file):
        return [next((split for split, words in SPLITS.items() if shard[1] in words), shard[1])]
    parts = [PurePosixPath(file).stem, *PurePosixPath(file).parts[:-1]]
    if other not in SPLITS and any(re.search(rf"(?<![^\W_]){re.escape(other)}(?![^\W_])", part) for part in parts):
        return [other]
    words = {word.lower() for part in parts for word in re.split(r"[^A-Za-z]+", part)}
    return [split for split, known in SPLITS.items() if not words.isdisjoint(known)]


def _subset(file: str) -> str:
    """Return the first folder that names a subset."""
    return next((part for part in PurePosixPath(file).parts[:-1] if part not in FOLDERS), "default")


def _check_whole(name: str, files: Sequence[str]) -> None:
    """Check that all parts `-00000-of-00002` are there: a cache may hold only some."""
    counts = [int(found[1]) for file in files if (found := _SHARD.search(file))]
    if counts and len(counts) < max(counts):
        there = f"{name}: {len(counts)} of its {max(counts)} files are"
        if not is_id(name):
            raise UserError(f"{there} there, {some(files, 4)}; add the others, or name the files that you mean.")
        raise UserError(f"{there} in the hub's cache; fetch it whole with {fetch_command(name, 'dataset')}.")
