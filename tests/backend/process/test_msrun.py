"""What a worker learns of the msrun that started it, also when that has gone."""

import os
import subprocess
import sys

import psutil
import pytest

from mindrlhf.backend.process import msrun
from mindrlhf.backend.process.launch import _choose_threads
from mindrlhf.backend.process.msrun import find_msrun

WORKER = """
from mindrlhf.backend.process.msrun import find_msrun
msrun = find_msrun()
print(msrun.joins, msrun.local_workers, msrun.environment["TOLD"])
"""
PARENT = """
import os, subprocess, sys
told = {"MS_ROLE": "MS_WORKER", "TOLD": "later"}
subprocess.run([sys.executable, "-c", sys.argv[-1]], env=os.environ | told)
"""


class Gone:
    """Process 1 on a machine where this user may not read its environment."""

    def __init__(self, pid: int):
        self.pid = pid

    def cmdline(self) -> list[str]:
        return ["/sbin/init"]

    def cpu_affinity(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))

    def environ(self) -> dict[str, str]:
        raise psutil.AccessDenied(self.pid)


@pytest.mark.parametrize(("join", "joins"), [("--join=True", True), ("--join=False", False), ("--worker_num=2", False)])
def test_what_msrun_was_started_with(tmp_path, join, joins):
    script = tmp_path / "msrun"
    script.write_text(PARENT)
    command = [sys.executable, str(script), "--local_worker_num=2", join, WORKER]
    environment = os.environ | {"TOLD": "first"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{joins} 2 first\n", done.stderr


def test_other_parents_are_no_msrun(monkeypatch):
    monkeypatch.delenv("MS_ROLE", raising=False)
    assert find_msrun() is None
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    assert find_msrun() is None


@pytest.mark.parametrize(("handed_on", "threads"), [("1", "3"), (None, "3"), ("2", "2")])
def test_threads_of_workers_that_msrun_has_left(monkeypatch, handed_on, threads):
    """With `--join=False` it may be gone before a worker looks, and process 1 is the parent then."""
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    monkeypatch.setattr(psutil, "Process", Gone)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", handed_on or "")
    if handed_on is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert msrun.find_msrun() is None
    _choose_threads(2, started_by_msrun=True)
    assert os.environ["OMP_NUM_THREADS"] == threads
