"""Settings and starts of a run, as `settings.json` in its output folder."""

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.json import read_json
from mindrlhf.units import GIB
from mindrlhf.version import __version__

SETTINGS_FILE = "settings.json"
STARTS = "starts"  # key of the file: `provenance` of the first start and of each resumed one
NAMED_PACKAGES = ("mindspore", "numpy", "tokenizers")
GIT_SECONDS = 20.0  # if a folder takes longer, no commit is recorded


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


def provenance() -> dict[str, Any]:
    """Describe this process's start as plain values: date, host, system, command, folder, commit."""
    program = Path(sys.argv[0])
    memory = psutil.virtual_memory().total / GIB
    command = ["python", sys.argv[0]] if program.suffix == ".py" else [program.name]
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB",
        "command": shlex.join([*command, *sys.argv[1:]]),
        "folder": os.getcwd(),
        "commit": git_commit(Path.cwd()),
    }


def git_commit(folder: Path) -> str | None:
    """Name a folder's project and commit, with `+` for changed files."""
    try:
        project, commit = _git(folder, "rev-parse", "--show-toplevel", "HEAD").splitlines()
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return f"{Path(project).name} {commit[:12]}{'+' if changed else ''}"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS).stdout
