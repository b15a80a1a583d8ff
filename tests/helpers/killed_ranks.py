"""Ranks of `mindrlhf train` as forks, of which one or all are killed while one waits in a chosen phase.

Ranks begin as those of `workers.run_ranks` do, and run `phases.py`. There is no msrun, so nobody ends a rank whose
partner is gone, and each has an exit code of its own.
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import phases
import psutil
import warm
from workers import free_port

from mindrlhf.backend.process.start import SCHEDULER, job_variables, rank_variables

PATIENCE_S = 120  # for a rank that has to end by itself, which takes 6 s
SHARED = "/dev/shm/"


@dataclass(frozen=True)
class Hold:
    """Where a rank waits: some Python calls into a phase of a step, or at the phase's end."""

    rank: int
    phase: str
    step: int
    calls: int


class Ranks:
    """Running ranks and their scheduler; rank n notes its phases in `folder`/rank_n, its output in rank_n.out."""

    def __init__(self, argv: Sequence[object], folder: Path, count: int, hold: Hold):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._hold = hold
        common = os.environ | warm.FIXED | {"PYTHONUNBUFFERED": "1"} | job_variables(count, "127.0.0.1", free_port())
        self.scheduler = self._start(argv, "scheduler", common | SCHEDULER)
        self.ranks = [self._start(argv, f"rank_{n}", common | rank_variables(n, n), n) for n in range(count)]

    def _start(self, argv: Sequence[object], name: str, environment: dict, rank: int = -1) -> warm.WarmProcess:
        log = self.folder / name
        log.write_text("")
        log.with_suffix(".go").unlink(missing_ok=True)
        hold = (self._hold.phase, self._hold.step, self._hold.calls) if rank == self._hold.rank else ()
        noted = phases.variables(log, hold, rank)
        with log.with_suffix(".out").open("w") as output:
            command = [phases.__file__, *map(str, argv)]
            return warm.start(command, output.fileno(), output.fileno(), environment | noted)

    def wait_for_hold(self) -> None:
        """Until the rank that is to wait does."""
        phases.wait_for(self.ranks[self._hold.rank], self.folder / f"rank_{self._hold.rank}", "held")

    def let_go(self) -> None:
        phases.let_go(self.folder / f"rank_{self._hold.rank}")

    def output(self, rank: int) -> str:
        return (self.folder / f"rank_{rank}.out").read_text(errors="replace")

    def wait_for_sentence(self, rank: int, sentence: str) -> None:
        """Until a rank has said it."""
        deadline = time.monotonic() + PATIENCE_S
        while sentence not in self.output(rank):
            assert time.monotonic() < deadline, self.output(rank)[-3000:]
            time.sleep(0.01)

    def family(self) -> list[psutil.Process]:
        """Every process of the job."""
        found = []
        for process in (self.scheduler, *self.ranks):
            with contextlib.suppress(psutil.NoSuchProcess):
                one = psutil.Process(process.pid)
                found += [one, *one.children(recursive=True)]
        return found

    def marked(self) -> list[psutil.Process]:
        """Living processes with this job's environment, which programs that it begins inherit."""
        return [one for one in psutil.process_iter() if _variable(one, "PHASE_LOG").startswith(f"{self.folder}/")]

    def kill(self) -> None:
        """SIGKILL to all that is left."""
        for one in (*self.family(), *self.marked()):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for process in (self.scheduler, *self.ranks):
            process.wait()


@contextlib.contextmanager
def held(argv: Sequence[object], folder: Path, count: int, hold: Hold) -> Iterator[Ranks]:
    """Ranks of which one waits; at the end of the block all are killed."""
    job = Ranks(argv, folder, count, hold)
    try:
        job.wait_for_hold()
        yield job
    finally:
        job.kill()


def kill_all(argv: Sequence[object], folder: Path, count: int, hold: Hold) -> None:
    """SIGKILL to all ranks and to what they have begun."""
    with held(argv, folder, count, hold):
        pass


def kill_all_somewhere(argv: Sequence[object], folder: Path, count: int, seed: str, reshards: bool = True) -> None:
    """SIGKILL to all ranks, at some call of one of them in a phase of the second step.

    reshards: whether the run has two layouts.
    """
    rng = random.Random(seed)
    phase = rng.choice(("generate", "update", "save", "report", *(["reshard"] if reshards else [])))
    hold = Hold(rng.randrange(count), phase, step=2, calls=phases.calls_into(rng))
    print(hold, flush=True)
    kill_all(argv, folder, count, hold)


def kill_one(argv: Sequence[object], folder: Path, victim: int, hold: Hold) -> None:
    """SIGKILL to one rank of two while it, or the other one, waits; the other one has to end by itself.

    It has to say in one sentence who is gone and to fail, and no process and no shared memory may be left.
    """
    with held(argv, folder, 2, hold) as job:
        family = job.family()
        shared = {path for one in family for path in _shared_memory(one)}
        other = 1 - victim
        sentence = f"rank {other} of 2: rank {victim} is gone"
        job.ranks[victim].kill()
        if (hold.rank, hold.phase) == (other, "export"):
            job.wait_for_sentence(other, sentence)  # it may have all that it needs, and end well before it learns
        job.let_go()
        codes = [process.wait(PATIENCE_S) for process in (job.ranks[victim], job.ranks[other], job.scheduler)]
        said = job.output(other)
        assert codes == [-9, 1, 1], (codes, said[-3000:])
        assert said.count(sentence) == 1, said[-3000:]
        assert "Traceback" not in said, said[-3000:]
        _, left = psutil.wait_procs([one for one in family if _lives(one)], PATIENCE_S)
        assert [one for one in (*left, *job.marked()) if _lives(one)] == []
        assert [path for path in shared if Path(path).exists()] == []


def _shared_memory(process: psutil.Process) -> set[str]:
    with contextlib.suppress(psutil.Error):
        return {one.path for one in process.memory_maps() if one.path.startswith(SHARED)}
    return set()


def _variable(process: psutil.Process, name: str) -> str:
    with contextlib.suppress(psutil.Error):
        return process.environ().get(name, "")
    return ""


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
