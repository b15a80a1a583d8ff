"""The project's shell scripts, with the `mindrlhf` of this environment."""

import os
import subprocess
import sys
from pathlib import Path

from workers import ROOT


def run_script(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`scripts/NAME`, started in `folder`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(ROOT / "scripts" / name), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1100)


def assert_refused(name: str, folder: Path, arguments: list[str], message: str, first: str = "--tasks NAMES") -> None:
    """A wrong option is refused with `message` and the options, from `first` on, before anything is done."""
    done = run_script(name, folder, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{name}: {message}; give {first}")
    assert done.stdout == ""
    assert list(folder.iterdir()) == []
