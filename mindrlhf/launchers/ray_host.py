"""Actor of a Ray cluster that starts one rank's processes on its node.

Ray is imported in methods, which run on the cluster.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from mindrlhf.backend.process.start import free_port, last_lines, own_environment
from mindrlhf.workers.cores import usable_cores
from mindrlhf.workers.descendants import adopt_orphans, end_all_children
from mindrlhf.workers.system_calls import SET_DEATH_SIGNAL, prctl

ENDING_S = 20.0  # for the kernel to let killed processes go
QUOTED = 4  # last lines of a log, in a message
THREADS = "OMP_NUM_THREADS"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"  # Ray sets it to the devices of an actor


class RankHost:
    """Processes of one rank; the first rank's host has the scheduler's too."""

    def __init__(self) -> None:
        adopt_orphans()
        self._processes: dict[str, subprocess.Popen] = {}
        self._logs: dict[str, Path] = {}
        self._shown: BinaryIO | None = None

    def place(self) -> tuple[str, str, int]:
        """Return the node's identity and address, and a free port."""
        ray = import_module("ray")
        address = ray.util.get_node_ip_address()
        return ray.get_runtime_context().get_node_id(), address, free_port("")

    def start(
        self, name: str, words: Sequence[str], variables: Mapping[str, str], folder: str, logs: str, ranks: int
    ) -> int:
        """Start a process, and return its number.

        name: of its log in the folder `logs`. words: after `python`. folder: working folder. ranks: on this node.
        """
        os.makedirs(logs, exist_ok=True)
        self._logs[name] = Path(logs) / f"{name}.log"
        environment = own_environment() | variables
        # Ray sets it to 1 in its own processes, as MindSpore does: one counts as unset.
        if environment.get(THREADS, "1") == "1":
            environment[THREADS] = str(max(1, len(usable_cores()) // ranks))
        if VISIBLE in environment:  # its only device is the first one that it sees
            environment["DEVICE_ID"] = "0"
        with self._logs[name].open("wb") as out:
            self._processes[name] = subprocess.Popen(
                [sys.executable, *words],
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self._processes[name].pid

    def poll(self) -> dict[str, int | None]:
        """Return the exit codes by name; None for a process that runs."""
        return {name: process.poll() for name, process in self._processes.items()}

    def read(self, name: str) -> str:
        """Return what a process has written since the last call."""
        if self._shown is None:
            self._shown = self._logs[name].open("rb")
        return self._shown.read().decode(errors="replace")

    def last_lines(self, name: str) -> str:
        """Quote the last lines of a process's log."""
        return last_lines([self._logs[name]], QUOTED)

    def request_stop(self) -> None:
        """Ask the rank to save and stop."""
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """End all processes, and what they have started."""
        for process in self._processes.values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        until = time.monotonic() + ENDING_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        end_all_children(max(0.0, until - time.monotonic()))


def _end_with_parent() -> None:
    """Let this process end with the actor, also if that is killed."""
    with suppress(OSError):
        prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
