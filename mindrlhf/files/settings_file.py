"""`settings.json` in a run's output folder: the settings at its start."""

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mindrlhf import __version__
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.json import read_json

SETTINGS_FILE = "settings.json"
NAMED_PACKAGES = ("mindspore", "numpy", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python, the suite and the packages that numbers depend on."""
    found = {"python": platform.python_version(), "mindrlhf": __version__}
    for name in NAMED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_settings(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Write nested settings of plain values, and the versions."""
    path = Path(folder) / SETTINGS_FILE
    text = json.dumps({**settings, "versions": versions()}, indent=1, ensure_ascii=False, default=str)
    with atomic_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the file of `write_settings`; empty without a file."""
    path = Path(folder) / SETTINGS_FILE
    return read_json(path) if path.is_file() else {}
