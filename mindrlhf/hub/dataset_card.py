"""Subsets and splits that a dataset's card lists, under `configs`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.files.text import read_text

CARD = "README.md"


@dataclass(frozen=True)
class Subset:
    """Subset of a dataset: split -> patterns of its files."""

    name: str
    splits: Mapping[str, Sequence[str]]
    default: bool


def read_subsets(path: Path) -> list[Subset]:
    """Read the subsets that a card lists with their files."""
    _, mark, rest = read_text(path, "a dataset's card").partition("---\n")
    try:
        head = yaml.safe_load(rest.partition("\n---")[0]) if mark else None
    except yaml.YAMLError:
        return []
    listed = head.get("configs") if isinstance(head, dict) else None
    found = [_subset(one) for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    return [one for one in found if one.splits]


def _subset(config: Mapping[str, Any]) -> Subset:
    files = config.get("data_files")
    if isinstance(files, list) and all(isinstance(one, dict) for one in files):
        files = {one.get("split", "train"): one.get("path") for one in files}
    elif not isinstance(files, dict):
        files = {} if files is None else {"train": files}
    folder = f"{config['data_dir']}/" if config.get("data_dir") else ""
    splits = {
        str(split): [f"{folder}{path}" for path in ([paths] if isinstance(paths, str) else paths or [])]
        for split, paths in files.items()
    }
    return Subset(str(config.get("config_name", "default")), splits, config.get("default") is True)


def files_of(patterns: Sequence[str], files: Sequence[str]) -> list[str]:
    """Choose the files that match a pattern; `*` stands for folders too."""
    return sorted(file for file in files if any(fnmatchcase(file, pattern.removeprefix("./")) for pattern in patterns))
