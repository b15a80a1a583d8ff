"""Ids of models and datasets on a hub, distinguished from paths."""

import re
from pathlib import Path

from mindrlhf.files.shipped import shipped_file

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Endings of files, which no id has.
_FILES = (
    ".json",
    ".jsonl",
    ".parquet",
    ".mindrecord",
    ".safetensors",
    ".ckpt",
    ".gguf",
    ".model",
    ".txt",
    ".yaml",
    ".py",
)
# Folder of a snapshot in the cache of either hub.
_SNAPSHOT = re.compile(r"/(?:models--)?([^/]+?)--([^/]+)/snapshots/[^/]+/?$")


def is_id(text: str | Path) -> bool:
    """Test for an id like `Qwen/Qwen2.5-0.5B-Instruct`; an existing path is not an id."""
    text = str(text)
    return bool(_ID.fullmatch(text)) and not text.endswith(_FILES) and not shipped_file(Path(text)).exists()


def id_of(folder: str | Path) -> str | None:
    """Find the id of a model in a hub's cache; None for another folder."""
    found = _SNAPSHOT.search(str(folder))
    return f"{found[1]}/{found[2]}" if found else None
