"""Run code on several workers under `msrun` and get each rank's result back.

`run_workers(2, __file__, "check", size=3)` calls `check(world, size=3)` of that file on two ranks, inside
`launch("CPU")`, and returns what each rank returned. Starting takes 10-15 s on two cores (four Python processes, of
which each imports MindSpore, and 3-7 s of negotiation between them), so put many checks into one run.
`run_msrun` is the layer below: any script with any arguments, left to end by itself.

This file is also the script that the workers run.
"""

import contextlib
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 40


class WorkersFailed(AssertionError):
    """A run did not end well; the message ends with each worker's last lines."""


@dataclass(frozen=True)
class MsrunResult:
    """How a run under msrun ended.

    returncode: msrun's own (1 whatever a worker's was). seconds: from start to msrun's end.
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

    With `library` the ranks talk through MindSpore, as they do on Ascend.

    Returns the results by rank as soon as all are there and kills what is left; with `to_the_end` (some seconds more)
    when msrun has ended well. Raises WorkersFailed when a worker raises or dies, or after `timeout` s.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        task = folder / "task.pickle"
        task.write_bytes(pickle.dumps((str(file), function, arguments, library)))
        results = [folder / f"result_{rank}.pickle" for rank in range(count)]
        deadline = time.monotonic() + timeout
        with _msrun(count, [__file__, str(task)], folder) as process:
            while process.poll() != 0 if to_the_end else not all(path.exists() for path in results):
                if process.poll() is not None or "exit with exception" in _text(folder / "msrun.log"):
                    raise WorkersFailed(f"{function} failed on {count} workers\n{_tails(folder)}")
                if time.monotonic() > deadline:
                    raise WorkersFailed(f"{function} took over {timeout} s on {count} workers\n{_tails(folder)}")
                time.sleep(0.05)
        return [pickle.loads(path.read_bytes()) for path in results]


def run_msrun(count: int, command: list[str | Path], *, timeout: float = 120, **environment: str | None) -> MsrunResult:
    """Run `msrun ... script arguments` to its own end; `environment` is added to its environment, None unsets a name.

    Raises WorkersFailed after `timeout` s; a failing worker is for the caller to judge.
    """
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start = time.monotonic()
        with _msrun(count, command, folder, environment) as process:
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise WorkersFailed(f"{command[0]} took over {timeout} s\n{_tails(folder)}") from None
        seconds = time.monotonic() - start
        logs = {rank: _text(folder / f"worker_{rank}.log") for rank in range(count)}
        logs["scheduler"] = _text(folder / "scheduler.log")
        return MsrunResult(process.returncode, seconds, _text(folder / "msrun.log"), logs)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


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
