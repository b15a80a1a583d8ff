"""Runs of `mindrlhf train` and `sft` that are killed in a chosen phase, and what they left.

`kill_in(argv, log, "update", step=2)` starts one, which waits for its end at some Python call in the phase: no clock
decides where. This file is also the script that runs: `mindrlhf`, whose rank $PHASE_RANK (0) notes each phase that it
enters in the file $PHASE_LOG, and waits where $PHASE_HELD says, until that file's `.go` is there. With $ON_CONTRACTS it
computes with Ascend's operators (`ascend_contracts`).
"""

import contextlib
import functools
import itertools
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
import warm

ROOT = Path(__file__).resolve().parents[2]
ON_CONTRACTS = "ON_CONTRACTS"
PHASES = ("generate", "update", "save", "reshard", "start", "report")


def start(
    argv: Sequence[object], log: Path, workers: int = 0, held: Sequence[object] = (), new: bool = False
) -> subprocess.Popen | warm.WarmProcess:
    """A run by itself, or under msrun with some workers; phases of rank 0 go to `log`, output to `log`.out.

    held: phase, first step and number of Python calls into the phase; there rank 0 waits, once, for `let_go`. new: the
    run imports everything itself, which takes seconds (see `warm`), as it does under msrun.
    """
    log.write_text("")
    log.with_suffix(".go").unlink(missing_ok=True)
    command = [__file__, *map(str, argv)]
    environment = os.environ | warm.FIXED | variables(log, held)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.with_suffix(".out").open("a") as output:
        if not workers and not new:
            return warm.start(command, output.fileno(), output.fileno(), environment)
        first = [sys.executable]
        if workers:
            from workers import free_port

            first = [Path(sys.executable).with_name("msrun"), f"--worker_num={workers}"]
            first += [f"--local_worker_num={workers}", f"--master_port={free_port()}"]
            first += [f"--log_dir={log.parent / 'msrun'}", "--join=True"]
        return subprocess.Popen([*map(str, first), *command], env=environment, stdout=output, stderr=output)


def variables(log: Path, held: Sequence[object], rank: int = 0) -> dict[str, str]:
    """What tells a process of a job which rank notes its phases in a file, and where that one waits."""
    return {"PHASE_LOG": str(log), "PHASE_HELD": json.dumps(list(held)), "PHASE_RANK": str(rank)}


def let_go(log: Path) -> None:
    """A held run goes on."""
    log.with_suffix(".go").touch()


def wait_for(process: subprocess.Popen | warm.WarmProcess, log: Path, phase: str, timeout: float = 300) -> None:
    """Until the run is in a phase, or waits in one ("held")."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if any(json.loads(line)[1] == phase for line in log.read_text().splitlines() if line.endswith("]")):
            return
        assert process.poll() is None, (phase, process.poll(), log.with_suffix(".out").read_text()[-3000:])
        time.sleep(0.002)
    raise AssertionError(f"no {phase} within {timeout} s")


def kill_in(argv: Sequence[object], log: Path, phase: str, step: int, rng: random.Random, workers: int = 0) -> None:
    """SIGKILL to the whole run at some Python call in the phase of a step, or at the phase's end."""
    process = start(argv, log, workers, held=(phase, step, calls_into(rng)))
    try:
        wait_for(process, log, "held")
    finally:
        kill(process)


def kill_twice(argv: Sequence[object], log: Path, steps: int, rng: random.Random, ahead: int = 0) -> None:
    """Run to the end with two of its steps killed, each in some phase; argv resumes by itself.

    ahead: steps before which a batch is drawn, so that the last ones may draw nothing.
    """
    for step in sorted(rng.sample(range(1, steps + 1), 2)):
        phase = rng.choice(("generate", "update", "save", "report")[step > steps - ahead :])
        kill_in(argv, log, phase, step, rng)
    to_the_end(argv, log)


def calls_into(rng: random.Random) -> int:
    """A number of Python calls, as likely a few as some hundreds."""
    return int(10 ** rng.uniform(0, 3))


def kill(process: subprocess.Popen | warm.WarmProcess) -> None:
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
    calls: int = 0,
    delay: float = 0.0,
) -> str:
    """Send one signal to a rank while rank 0 is in a phase of a step; the run must end well by itself.

    calls: Python calls into the phase. delay: seconds, for the phase "start", in which nothing can be held.
    Returns the output.
    """
    starts = phase == "start"
    process = start(argv, log, workers, held=() if starts else (phase, step, calls), new=starts)
    try:
        wait_for(process, log, phase if phase == "start" else "held")
        time.sleep(delay)
        (process if not workers else worker(process, rank)).send_signal(number)
        let_go(log)
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


class _Noting:
    """Notes the phases that a rank enters, with their steps, and waits in one of them."""

    def __init__(self):
        self._file = os.open(os.environ["PHASE_LOG"], os.O_WRONLY | os.O_APPEND)
        self._held, self._step = json.loads(os.environ["PHASE_HELD"]), 0

    def note(self, phase: str, step: int | None = None) -> None:
        os.write(self._file, f'[{self._step if step is None else step}, "{phase}"]\n'.encode())

    def follow(self, steps):
        """The loop's steps, which are those of phases that are not told one."""

        @functools.wraps(steps)
        def followed(run):
            for self._step in steps(run):
                yield self._step

        return followed

    def hold(self) -> None:
        """Wait, once, until the test lets go or kills."""
        if self._held:
            self._held = None
            self.note("held")
            while not Path(os.environ["PHASE_LOG"]).with_suffix(".go").exists():
                time.sleep(0.002)

    def __call__(self, phase: str, function):
        """The function as a phase; its step is that of the call, or the loop's."""

        @functools.wraps(function)
        def noted(*arguments, **named):
            steps = [argument for argument in arguments if type(argument) is int]
            steps += [argument.step for argument in arguments[1:] if hasattr(argument, "step")] + [self._step]
            self.note(phase, steps[0])
            held = bool(self._held) and self._held[0] == phase and self._held[1] <= steps[0]
            if held:
                sys.setprofile(_after_calls(self._held[2], self.hold))
            try:
                return function(*arguments, **named)
            finally:
                if held:
                    sys.setprofile(None)
                    self.hold()
                self.note("other")

        return noted


def _after_calls(count: int, action):
    """A profile function that acts at the call of a number, and then ends."""
    calls = itertools.count()

    def profile(frame, event: str, argument) -> None:
        if event == "call" and next(calls) == count:
            sys.setprofile(None)
            action()

    return profile


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
    if ON_CONTRACTS not in os.environ:
        return cli.main(sys.argv[1:])
    from ascend_contracts import contracts

    with contracts():
        return cli.main(sys.argv[1:])


def _note_phases() -> None:
    from mindrlhf.trainer import start

    launch, phase = start.launch, _Noting()
    noting = int(os.environ["PHASE_RANK"])
    if os.environ.get("MS_ROLE") != "MS_SCHED" and os.environ.get("RANK_ID", "0") == str(noting):
        phase.note("start")

    def launched(*arguments, **named):
        """Patched once MindSpore may be imported."""
        world = launch(*arguments, **named)
        if world.rank == noting:
            _patch(phase)
        return world

    start.launch = launched


def _patch(phase: _Noting) -> None:
    from mindrlhf.checkpoint.store import CheckpointStore
    from mindrlhf.evaluation.validation import ToldValidation
    from mindrlhf.reshard.online import OnlineReshard
    from mindrlhf.run.report import TuningReport
    from mindrlhf.run.run import Run
    from mindrlhf.run.step_report import StepReport
    from mindrlhf.trainer.grpo import GRPOLoop
    from mindrlhf.trainer.rollouts import DrawnApart, Rollouts
    from mindrlhf.trainer.sft import SFTLoop
    from mindrlhf.trainer.sources import FreshRollouts, RolloutsInParts

    Run.steps = phase.follow(Run.steps)
    Run.export = phase("export", Run.export)
    FreshRollouts.collect = phase("generate", FreshRollouts.collect)
    RolloutsInParts._draw_parts = phase("generate", RolloutsInParts._draw_parts)
    Rollouts.score = phase("score", Rollouts.score)
    DrawnApart.tell = phase("hand over", DrawnApart.tell)
    GRPOLoop.update = phase("update", GRPOLoop.update)
    SFTLoop.train = phase("update", SFTLoop.train)
    CheckpointStore._write = phase("save", CheckpointStore._write)
    OnlineReshard.run = phase("reshard", OnlineReshard.run)
    ToldValidation.__call__ = phase("validate", ToldValidation.__call__)
    for report in (StepReport, TuningReport):
        report.write = phase("report", report.write)


if __name__ == "__main__":
    sys.exit(_main())
