"""Runs of `mindrlhf train` and `sft` that are killed in a chosen phase, and what they left.

`kill_in(argv, log, "update", step=2)` starts one and sends the signal some moment after it has entered the phase.
This file is also the script that runs: `mindrlhf`, noting each phase that it enters in the file $PHASE_LOG.
"""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PHASES = ("generate", "update", "save", "reshard", "start", "report")


def start(argv: Sequence[object], log: Path, workers: int = 0) -> subprocess.Popen:
    """A run by itself, or under msrun with some workers; phases of rank 0 go to `log`, output to `log`.out."""
    log.write_text("")
    command = [sys.executable, __file__, *map(str, argv)]
    if workers:
        from workers import free_port

        msrun = [Path(sys.executable).with_name("msrun"), f"--worker_num={workers}", f"--local_worker_num={workers}"]
        command = [*msrun, f"--master_port={free_port()}", f"--log_dir={log.parent / 'msrun'}", "--join=True"]
        command += [__file__, *map(str, argv)]
    environment = {"OMP_NUM_THREADS": "2", "GLOG_v": "3", "PYTHONPATH": str(ROOT), "PHASE_LOG": str(log)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.with_suffix(".out").open("a") as output:
        return subprocess.Popen(
            [str(part) for part in command], env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )


def wait_for(process: subprocess.Popen, log: Path, phase: str, step: int, timeout: float = 300) -> bool:
    """Whether the run came to a phase of a step, or a later one of the same kind, before it ended."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        notes = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("]")]
        if any(noted == phase and at >= step for at, noted in notes):
            return True
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    raise AssertionError(f"no {phase} of step {step} within {timeout} s")


def kill_in(
    argv: Sequence[object], log: Path, phase: str, step: int, rng: random.Random, workers: int = 0, within: float = 0.1
) -> str:
    """SIGKILL to the whole run a random moment after it has entered the phase. Returns the phase that it was in."""
    process = start(argv, log, workers)
    try:
        assert wait_for(process, log, phase, step), (process.poll(), log.with_suffix(".out").read_text()[-3000:])
        time.sleep(rng.uniform(0, within))
    finally:
        kill(process)
    return json.loads(log.read_text().splitlines()[-1])[1]


def kill(process: subprocess.Popen) -> None:
    """SIGKILL to a process and all it has started: msrun's workers are in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in [family, *family.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def to_the_end(argv: Sequence[object], log: Path, workers: int = 0, timeout: float = 600) -> str:
    """Run to the end, which must be a good one; returns the output."""
    process = start(argv, log, workers)
    output = log.with_suffix(".out")
    try:
        code = process.wait(timeout)
    finally:
        kill(process)
    assert code == 0, (code, output.read_text()[-3000:])
    return output.read_text()


def signalled(
    argv: Sequence[object],
    log: Path,
    phase: str,
    step: int,
    number: int = signal.SIGTERM,
    workers: int = 0,
    rank: int = 0,
    delay: float = 0.0,
) -> str:
    """Send one signal to a rank, some seconds after rank 0 has entered a phase; the run must end well by itself.

    Returns the output.
    """
    process = start(argv, log, workers)
    try:
        assert wait_for(process, log, phase, step), (process.poll(), log.with_suffix(".out").read_text()[-3000:])
        time.sleep(delay)
        (process if not workers else worker(process, rank)).send_signal(number)
        code = process.wait(300)
    finally:
        kill(process)
    assert code == 0, (code, log.with_suffix(".out").read_text()[-3000:])
    return log.with_suffix(".out").read_text()


def worker(process: subprocess.Popen, rank: int) -> psutil.Process:
    """One of msrun's workers."""
    for child in psutil.Process(process.pid).children():
        environment = child.environ()
        if environment.get("MS_ROLE") == "MS_WORKER" and environment.get("RANK_ID") == str(rank):
            return child
    raise AssertionError(f"there is no rank {rank}")


def _noting(log: int, phase: str, function):
    """The function, which notes that it is entered, with the step that it is called with if it is."""

    @functools.wraps(function)
    def noted(self, *arguments, **named):
        steps = [argument for argument in arguments if type(argument) is int]
        steps += [argument.step for argument in arguments if hasattr(argument, "step")] + [_noting.step]
        _noting.step = steps[0]
        os.write(log, f'[{_noting.step}, "{phase}"]\n'.encode())
        try:
            return function(self, *arguments, **named)
        finally:
            os.write(log, f'[{_noting.step}, "other"]\n'.encode())

    return noted


def _main() -> int:
    from mindrlhf import cli
    from mindrlhf.run.stop_signals import StopSignals

    enter = StopSignals.__enter__

    def entered(signals: StopSignals) -> StopSignals:
        """Once signals are minded, NumPy may be imported."""
        enter(signals)
        _note_phases()
        return signals

    StopSignals.__enter__ = entered
    return cli.main(sys.argv[1:])


def _note_phases() -> None:
    from mindrlhf.backend.process.launch import is_first_process
    from mindrlhf.trainer import start

    launch, log = start.launch, os.open(os.environ["PHASE_LOG"], os.O_WRONLY | os.O_APPEND)
    _noting.step = 0
    if is_first_process():
        os.write(log, b'[0, "start"]\n')

    def launched(*arguments, **named):
        """Patched once MindSpore may be imported."""
        world = launch(*arguments, **named)
        if world.rank == 0:
            from mindrlhf.checkpoint.store import CheckpointStore
            from mindrlhf.reshard.online import OnlineReshard
            from mindrlhf.run.step_report import StepReport
            from mindrlhf.run.tuning_report import TuningReport
            from mindrlhf.trainer.grpo import GRPOLoop
            from mindrlhf.trainer.sft import SFTLoop

            GRPOLoop.collect = _noting(log, "generate", GRPOLoop.collect)
            GRPOLoop.update = _noting(log, "update", GRPOLoop.update)
            SFTLoop.train = _noting(log, "update", SFTLoop.train)
            CheckpointStore._write = _noting(log, "save", CheckpointStore._write)
            OnlineReshard.run = _noting(log, "reshard", OnlineReshard.run)
            for report in (StepReport, TuningReport):
                report.write = _noting(log, "report", report.write)
        return world

    start.launch = launched


if __name__ == "__main__":
    sys.exit(_main())
