"""The `msrun` process that started this one. Imports neither NumPy nor MindSpore."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

MODULE = "mindspore.parallel.cluster.run"  # for `python -m`
_NAMES = ("msrun", MODULE)  # of the script, and of the module


@dataclass(frozen=True)
class Msrun:
    """Options that msrun was started with.

    joins: msrun waits for its workers, and the job ends with it. local_workers: workers on this host, or None for all.
    cores: cores that msrun may use. environment: msrun's own, before MindSpore's import added to it.
    """

    pid: int
    joins: bool
    local_workers: int | None
    cores: frozenset[int]
    environment: dict[str, str]


def find_msrun() -> Msrun | None:
    """Find this process's msrun; None without one, or when it has gone."""
    if not os.environ.get("MS_ROLE"):
        return None
    try:
        parent = psutil.Process(os.getppid())
        command = parent.cmdline()
        cores = frozenset(parent.cpu_affinity())
        environment = parent.environ()
    except psutil.Error:  # gone; or the parent is now another process, whose environment is not readable
        return None
    if not any(part in _NAMES or Path(part).name in _NAMES for part in command):
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--local_worker_num", type=int)
    parser.add_argument("--join")
    options, _ = parser.parse_known_args(command)
    return Msrun(parent.pid, options.join == "True", options.local_worker_num, cores, environment)
