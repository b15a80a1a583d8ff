"""Circumstances of a run: date, host, command, and commit of the user's project."""

import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from mindrlhf.units import GIB

GIT_SECONDS = 20.0  # if a folder takes longer, no commit is recorded


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
