"""Temporary folders of dead processes go, and those of living ones, of others and of other versions stay."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mindrlhf.files.owned_folder import OWNER, owned_folder

HOLDER = """
from mindrlhf.files.owned_folder import owned_folder
folder = owned_folder("things-")
print(folder.name, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    tempfile.tempdir = None


def holder() -> tuple[subprocess.Popen, Path]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLDER], text=True, **pipes)
    return process, Path(process.stdout.readline().strip())


def test_only_what_dead_processes_left_goes(tmp_path):
    (killed, dead), (living, kept) = holder(), holder()
    (dead / "rank_0").mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    for name in ("things-other_version", "other-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "things-link").symlink_to(kept)
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / "things-trap").mkdir()
    (tmp_path / "things-trap" / OWNER).symlink_to(tmp_path / "theirs")
    assert dead.is_dir()
    with owned_folder("things-") as mine:
        assert not dead.exists()
        others = {kept.name, "things-other_version", "other-1", "things-link", "theirs", "things-trap"}
        assert set(os.listdir(tmp_path)) == {Path(mine).name} | others
        assert os.listdir(kept) == [OWNER]
    living.communicate("\n", timeout=20)
    assert not kept.exists()
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_many_at_once(tmp_path):
    """Each removes the others' leftovers while they begin and end."""
    processes = [holder() for _ in range(6)]
    assert all(folder.is_dir() for _, folder in processes)
    for process, _ in processes[::2]:
        process.kill()
    for process, _ in processes[::2]:
        process.wait()
    owned_folder("things-").cleanup()
    assert [folder.exists() for _, folder in processes] == [False, True] * 3
    for process, _ in processes[1::2]:
        process.communicate("\n", timeout=20)
    assert os.listdir(tmp_path) == []
