"""Run code on several workers and get each rank's result back.

`run_workers(2, __file__, "check", size=3)` calls `check(world, size=3)` of that file on two ranks, inside
`launch("CPU")`, and returns what each rank returned. `run_ranks` is the layer below: any script with any arguments,
left to end by itself. Both start the ranks with msrun's environment and without msrun, as forks (see `warm`);
`run_msrun` starts msrun, which takes 10 s more of a processor (it imports MindSpore, and so does each worker).

This file is also the script that the workers run.
"""

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import warm

from mindrlhf.backend.process.start import SCHEDULER, free_port, job_variables, rank_variables

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 40


class WorkersFailed(AssertionError):
    """A run did not end well; the message ends with each worker's last lines."""


@dataclass(frozen=True)
class RanksResult:
    """How a run of several ranks ended.

    returncode: msrun's own (1 whatever a worker's was). seconds: from start to end.
    output: msrun's, with the workers' mixed in. logs: each worker's whole output by rank; `scheduler`'s too.
    """

    returncode: int
    seconds: float
    output: str
    logs: dict[int | str, str]


def run_workers(
    count: int,
    file: str | Path,
    function: str,
    /,
    *,
    timeout: float = 120,
    to_the_end: bool = False,
    library: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Call `function(world, **arguments)` of the Python file on `count` ranks; arguments and results are pickled.

    With `library` the ranks talk through MindSpore, as they do on Ascend, and msrun starts them.

    Returns the results by rank as soon as all are there and kills what is left; with `to_the_end` (some seconds more)
    when the ranks have ended well. Raises WorkersFailed when a worker raises or dies, or after `timeout` s.
    """
    started = _msrun if library else _ranks
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        task = folder / "task.pickle"
        task.write_bytes(pickle.dumps((str(file), function, arguments, library)))
        results = [folder / f"result_{rank}.pickle" for rank in range(count)]
        deadline = time.monotonic() + timeout
        with started(count, [__file__, str(task)], folder) as process:
            while process.poll() != 0 if to_the_end else not all(path.exists() for path in results):
                if process.poll() is not None or "exit with exception" in _text(folder / "msrun.log"):
                    raise WorkersFailed(f"{function} failed on {count} workers\n{_tails(folder)}")
                if time.monotonic() > deadline:
                    raise WorkersFailed(f"{function} took over {timeout} s on {count} workers\n{_tails(folder)}")
                time.sleep(0.05)
        return [pickle.loads(path.read_bytes()) for path in results]


def run_ranks(count: int, command: list[str | Path], *, timeout: float = 120, **environment: str) -> RanksResult:
    """Run `script arguments` on ranks to their own end; `environment` is added to their environment.

    Raises WorkersFailed after `timeout` s; a failing worker is for the caller to judge.
    """
    return _ended(_ranks, count, command, timeout, environment)


def run_msrun(count: int, command: list[str | Path], *, timeout: float = 120, **environment: str | None) -> RanksResult:
    """`run_ranks` as `msrun ... script arguments`; None unsets a name of the environment."""
    return _ended(_msrun, count, command, timeout, environment)


def _ended(started, count: int, command: list[str | Path], timeout: float, environment: dict) -> RanksResult:
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start = time.monotonic()
        with started(count, command, folder, environment) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise WorkersFailed(f"{command[0]} took over {timeout} s\n{_tails(folder)}") from None
        seconds = time.monotonic() - start
        logs = {rank: _text(folder / f"worker_{rank}.log") for rank in range(count)}
        logs["scheduler"] = _text(folder / "scheduler.log")
        return RanksResult(process.returncode, seconds, _text(folder / "msrun.log"), logs)


class _Ranks:
    """Ranks and their scheduler, as one process: its exit code is 1 as soon as one has failed."""

    def __init__(self, processes: Sequence[warm.WarmProcess]):
        self.processes = processes
        self.returncode: int | None = None

    def poll(self) -> int | None:
        codes = [process.poll() for process in self.processes]
        if self.returncode is None and (any(codes) or None not in codes):
            self.returncode = int(any(codes))
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("ranks", timeout)
            time.sleep(0.05)
        return self.returncode


@contextlib.contextmanager
def _ranks(count: int, command: list[str | Path], folder: Path, environment: dict[str, str] | None = None):
    """Running ranks, with what msrun would give them; at the end of the block all are killed."""
    job = job_variables(count, "127.0.0.1", free_port())
    common = os.environ | warm.FIXED | {"PYTHONUNBUFFERED": "1"} | job | (environment or {})
    roles = {"scheduler": SCHEDULER} | {f"worker_{rank}": rank_variables(rank, rank) for rank in range(count)}
    processes = []
    try:
        for name, role in roles.items():
            with (folder / f"{name}.log").open("w") as log:
                processes.append(warm.start(command, log.fileno(), log.fileno(), common | role))
        yield _Ranks(processes)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()  # until then it may hold files and locks


@contextlib.contextmanager
def _msrun(count: int, command: list[str | Path], folder: Path, environment: dict[str, str | None] | None = None):
    """A running msrun; at the end of the block it and all its children are killed."""
    binaries = Path(sys.executable).parent
    port = free_port()
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOG_v": "3", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    env["PATH"] = f"{binaries}{os.pathsep}{env['PATH']}"  # msrun starts whatever `python` comes first
    env = {name: value for name, value in (env | (environment or {})).items() if value is not None}
    msrun = [binaries / "msrun", f"--worker_num={count}", f"--local_worker_num={count}", f"--master_port={port}"]
    msrun += [f"--log_dir={folder}", "--join=True"]
    with (folder / "msrun.log").open("w") as log:
        process = subprocess.Popen([*msrun, *command], env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        _kill(process)


def _kill(process: subprocess.Popen) -> None:
    """Kill msrun and its children: not by process group, because each worker has its own session."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in [family, *family.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _tails(folder: Path) -> str:
    logs = [*sorted(folder.glob("worker_*.log")), folder / "scheduler.log"]
    return "\n".join("\n".join([f"--- {log.name}", *_text(log).splitlines()[-TAIL_LINES:]]) for log in logs)


def _work(task: Path) -> None:
    """What one rank does: load the file, call the function, leave the result under its final name."""
    from mindrlhf.backend.process.launch import join_library, launch

    file, function, arguments, library = pickle.loads(task.read_bytes())
    if library and os.environ["MS_ROLE"] == "MS_SCHED":
        from mindspore import communication

        communication.init("mccl")
        return
    with join_library("mccl") if library else launch("CPU") as world:
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # MindSpore looks up by name where a compiled function comes from
        spec.loader.exec_module(module)
        result = getattr(module, function)(world, **arguments)
        partial = task.parent / f"partial_{world.rank}"
        partial.write_bytes(pickle.dumps(result))
        partial.rename(task.parent / f"result_{world.rank}.pickle")


if __name__ == "__main__":
    _work(Path(sys.argv[1]))
