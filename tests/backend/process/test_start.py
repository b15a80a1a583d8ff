"""Processes that are started and ended with all that they have started, and the variables of ranks."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mindrlhf.acceptance import runs
from mindrlhf.acceptance.checks import Trial
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.process.msrun import MODULE
from mindrlhf.backend.process.start import module_command, own_environment, rank_variables, running

pytestmark = pytest.mark.fast

# As msrun starts its ranks: in sessions of their own.
FAMILY = 'setsid sleep 600 & echo "$!" >"$0"; test "$1" = goes || wait'


def left(file: Path) -> bool:
    """Whether the process is there whose number is in a file."""
    number = int(file.read_text())
    return psutil.pid_exists(number) and psutil.Process(number).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("parent", ["stays", "goes"])
def test_what_a_process_has_started_ends_with_it(tmp_path, parent):
    file = tmp_path / "child"
    with running(["bash", "-c", FAMILY, str(file), parent]) as process:
        if parent == "goes":
            process.wait()
        while not file.exists() or not file.read_text().strip():
            assert process.poll() is None or parent == "goes"
        assert left(file)
    assert process.poll() is not None
    assert not left(file)


def test_a_command_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    """The patience that `--timeout_s` gives, with a command that never ends."""
    monkeypatch.setattr(runs, "module_command", lambda *words: ["sleep", "600"])
    trial = Trial(CPU, tmp_path, patience_s=0.0)
    with pytest.raises(RuntimeError, match="mindrlhf train did not end within 0 s and was stopped: its log is empty"):
        runs.run_command(trial, tmp_path, "train", "train", ranks=2)
    monkeypatch.setattr(runs, "module_command", lambda *words: ["bash", "-c", "echo because; exit 3"])
    with pytest.raises(RuntimeError, match="mindrlhf train ended with code 3: because"):
        runs.run_command(Trial(CPU, tmp_path), tmp_path, "train", "train")


def test_a_process_is_no_rank_of_its_starters_job(monkeypatch):
    for name, value in (rank_variables(3, 1) | {"MS_WORKER_NUM": "4"}).items():
        monkeypatch.setenv(name, value)
    own = own_environment()
    assert {"MS_ROLE", "RANK_ID", "MS_NODE_ID", "MS_WORKER_NUM"}.isdisjoint(own)
    found = subprocess.run(
        ["python", "-c", "import mindrlhf, sys; print(sys.executable)"], env=own, cwd="/", check=True
    )
    assert found.returncode == 0
    assert own["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_one_rank_needs_no_msrun(tmp_path):
    assert module_command("mindrlhf", ["plan"], 1, tmp_path) == [sys.executable, "-m", "mindrlhf", "plan"]
    words = module_command("mindrlhf", ["plan", 1], 2, tmp_path)
    assert words[:3] == [sys.executable, "-m", MODULE]
    assert words[words.index("python") :] == ["python", "-m", "mindrlhf", "plan", "1"]
