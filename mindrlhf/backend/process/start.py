"""Start and end of the processes of a job.

Each is this Python, alone or as one of several ranks. Imports neither NumPy nor MindSpore.
"""

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mindrlhf.backend.process.msrun import MODULE
from mindrlhf.workers.descendants import end_marked

SCHEDULER: Mapping[str, str] = {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}  # variables of the scheduler's process
OF_A_RANK = ("MS_ROLE", "RANK_ID", "MS_NODE_ID", "MS_WORKER_NUM")  # only in processes of a job
MARK = "MINDRLHF_JOB"  # variable with the mark of a process and of all that it starts


def job_variables(workers: int, host: str, port: int) -> dict[str, str]:
    """Return the variables that msrun gives to all processes of a job.

    workers: on all hosts. host, port: address of the scheduler.
    """
    count = str(workers)
    return {"MS_WORKER_NUM": count, "RANK_SIZE": count, "MS_SCHED_HOST": host, "MS_SCHED_PORT": str(port)}


def rank_variables(rank: int, device: int) -> dict[str, str]:
    """Return the variables that msrun gives to one rank.

    device: its number on the rank's host.
    """
    number = str(rank)
    return {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": number, "RANK_ID": number, "DEVICE_ID": str(device)}


def msrun_words(workers: int, local_workers: int, **options: object) -> list[str]:
    """Write msrun with its options, as words after `python`.

    The program of the ranks follows. local_workers: on each host. options: further ones of msrun, which are left out
    if None.
    """
    numbers = {"worker_num": workers, "local_worker_num": local_workers, "join": True, **options}
    return ["-m", MODULE, *(f"--{name}={value}" for name, value in numbers.items() if value is not None)]


def module_command(module: str, arguments: Sequence[object], ranks: int, logs: Path) -> list[str]:
    """Build the command of a module, under msrun for several ranks.

    logs: folder of the ranks' logs.
    """
    words = ["-m", module, *map(str, arguments)]
    if ranks == 1:
        return [sys.executable, *words]
    return [sys.executable, *msrun_words(ranks, ranks, log_dir=logs, master_port=free_port()), "python", *words]


def own_environment() -> dict[str, str]:
    """Return the environment of a new process.

    In it `python` is this one, and finds this package.
    """
    own = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{own.get('PATH', '')}"
    package = str(Path(__file__).resolve().parents[3])
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [package, own.get("PYTHONPATH", "")]))
    own["PYTHONUNBUFFERED"] = "1"
    return own


def free_port(host: str = "127.0.0.1") -> int:
    """Find a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str], out: TextIO | None = None, folder: Path | None = None
) -> Iterator[subprocess.Popen]:
    """Start a process, which ends with the block, and with it all its descendants.

    Ranks of an msrun that has gone are found too, by a mark in their environment. out: file of both outputs, or None
    for this process's own. folder: working folder.
    """
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env=own_environment() | {MARK: mark},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out and subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_marked(mark, MARK)
        process.kill()  # a process that has just begun may not show its mark yet
        process.wait()


def ending(code: int) -> str:
    """Describe an exit code."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def last_lines(logs: Sequence[Path], count: int) -> str:
    """Quote the last lines of the first log that has any."""
    for path in logs:
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        if lines:
            return " | ".join(line.strip() for line in lines[-count:])
    return "its log is empty"
