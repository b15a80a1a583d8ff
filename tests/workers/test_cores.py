"""Cores that a process may use, where the system says so and where it does not."""

import os
import subprocess
import sys

from mindrlhf.workers.cores import usable_cores


def test_cores_are_those_that_the_process_is_bound_to():
    one = min(os.sched_getaffinity(0))
    bind = f"import os; os.sched_setaffinity(0, [{one}])"
    source = f"{bind}; from mindrlhf.workers import cores; print(*cores.usable_cores())"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == f"{one}\n"


def test_a_system_that_does_not_bind_processes_gives_all(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores() == set(range(os.cpu_count()))
