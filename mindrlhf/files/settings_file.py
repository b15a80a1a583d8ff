"""Settings and starts of a run, as `settings.json` in its output folder."""

import json
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.json import read_json
from mindrlhf.files.provenance import provenance
from mindrlhf.version import __version__

SETTINGS_FILE = "settings.json"
STARTS = "starts"  # key of the file: `provenance` of the first start and of each resumed one
NAMED_PACKAGES = ("mindspore", "numpy", "tokenizers")


def versions() -> dict[str, str]:
    """Collect versions of Python, the suite, and packages that results depend on."""
    found = {"python": platform.python_version(), "mindrlhf": __version__}
    for name in NAMED_PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def write_settings(folder: Path, settings: Mapping[str, Any], resumed: bool = False) -> Path:
    """Write nested settings of plain values, the versions, and the run's starts.

    resumed: keep the earlier starts.
    """
    path = Path(folder) / SETTINGS_FILE
    earlier = read_settings(folder).get(STARTS, []) if resumed else []
    content = {**settings, "versions": versions(), STARTS: [*earlier, provenance()]}
    text = json.dumps(content, indent=1, ensure_ascii=False, default=str)
    with atomic_file(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
    return path


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the file of `write_settings`; empty without a file."""
    path = Path(folder) / SETTINGS_FILE
    return read_json(path) if path.is_file() else {}
