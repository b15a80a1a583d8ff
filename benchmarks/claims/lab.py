"""Results folder of the claims: which runs there are, which are missing, and how these are made."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from claim import Claim, Claims
from measures import Figures
from start_model import ENVIRONMENT, StartModel

import mindrlhf
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import make_folder
from mindrlhf.files.folder_lock import lock_folders

MEASURES = "trainer.test_freq"
MOST_RUNS = 25  # of a process: MindSpore keeps some memory of each

CODE = (".py", ".cpp", ".h", ".yaml")  # suffixes of the package's files that results depend on


@dataclass(frozen=True)
class Run:
    """A run. key: digest of all that determines it but the code; arms with the same settings share it."""

    key: str
    settings: Mapping[str, str]
    start: str
    seed: int

    def arguments(self, start: StartModel) -> list[str]:
        """Arguments of `mindrlhf train`; held-out problems where the settings measure them."""
        held_out = [start.held_out] if MEASURES in self.settings else []
        return [*start.flags(), *held_out, *(f"{name}={value}" for name, value in self.settings.items())]


class Lab:
    """Runs of the claims in a folder.

    seeds: number of seeds. steps: of each run in place of the records'; for trials. Results are kept by key, each
    written whole, so that a stopped lab goes on with the next run.
    """

    def __init__(self, claims: Claims, folder: Path, seeds: int, steps: int | None = None):
        self.claims = claims
        self.folder = folder
        self.seeds = seeds
        self.steps = steps
        self.start_key = digest(claims.start)
        self.start = StartModel(folder / f"start_{self.start_key}")

    def run(self, arm: str, seed: int) -> Run:
        """The run of an arm with a seed. Later settings go over earlier ones of the same name."""
        last = [f"seed={seed}", *([f"trainer.total_steps={self.steps}"] if self.steps else [])]
        given = (*self.claims.common, *self.claims.arms[arm], *last)
        settings = dict(setting.split("=", 1) for setting in given)
        settings = {name: settings[name] for name in sorted(settings)}
        return Run(key=digest([self.start_key, settings]), settings=settings, start=self.start_key, seed=seed)

    def result(self, run: Run) -> Path:
        return self.folder / "runs" / f"{run.key}.json"

    def stored(self, run: Run) -> dict[str, Any] | None:
        """What a finished run has left: settings, code and figures."""
        path = self.result(run)
        if not path.is_file():
            return None
        content = json.loads(path.read_text())
        content["figures"] = {
            metric: {int(step): value for step, value in steps.items()} for metric, steps in content["figures"].items()
        }
        return content

    def figures(self, arm: str) -> list[Figures]:
        """Figures of an arm's finished runs, by seed; shorter than `seeds` if some are missing."""
        found = (self.stored(self.run(arm, seed)) for seed in range(self.seeds))
        return [content["figures"] for content in found if content]

    def missing(self, claims: Iterable[Claim]) -> list[Run]:
        """Runs that these claims need and the folder lacks, arm by arm; a run of several arms once."""
        arms = dict.fromkeys(arm for claim in claims for arm in (claim.first, claim.second))
        runs = {run.key: run for arm in arms for run in (self.run(arm, seed) for seed in range(self.seeds))}
        return [run for run in runs.values() if not self.result(run).is_file()]

    def make(self, claims: Sequence[Claim], processes: int, say: Callable[[str], None] = print) -> None:
        """Make the start model and the missing runs, in this many processes at a time.

        Raises UserError, once the others are made, if some fail; and if another lab is at work in the folder.
        """
        if self.missing(claims):
            make_folder(self.folder)
            with lock_folders({"--out": self.folder}):
                self._make_runs(self.missing(claims), processes, say)

    def _make_runs(self, missing: Sequence[Run], processes: int, say: Callable[[str], None]) -> None:
        make_folder(self.folder / "runs")
        make_folder(self.folder / "logs")
        if not self.start.ready:
            say("start model: problems, tokenizer, a short fine-tuning")
            self.start.make(self.claims.start, self.folder / "logs" / "start.txt")
        progress = Progress(len(missing), say)
        code = code_digest()
        size = min(MOST_RUNS, -(-len(missing) // processes))
        parts = [missing[first : first + size] for first in range(0, len(missing), size)]
        with ThreadPoolExecutor(processes) as pool:
            children = Children()
            try:
                failed = list(pool.map(lambda runs: self._make_some(runs, code, children, progress), parts))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                children.end()
        if sentences := list(chain.from_iterable(failed)):
            raise UserError(" ".join(sentences))

    def _make_some(self, runs: Sequence[Run], code: str, children: "Children", progress: "Progress") -> list[str]:
        """Make runs in a process; returns a sentence for each that fails."""
        log = self.folder / "logs" / f"{runs[0].key}.txt"
        job = log.with_suffix(".json")
        waiting = {str(self.result(run)): run for run in runs}
        jobs = [
            {
                "result": result,
                "about": {"settings": run.settings, "start": run.start, "code": code},
                "arguments": run.arguments(self.start),
            }
            for result, run in waiting.items()
        ]
        job.write_text(json.dumps({"runs": jobs}))
        failed = []
        with log.open("w") as file:
            child = children.start([sys.executable, str(Path(__file__).with_name("runs.py")), str(job)], file)
            for line in child.stdout:
                outcome = json.loads(line)
                name = self.names(waiting.pop(outcome["result"]))
                if "error" in outcome:
                    failed.append(f"{name}: {outcome['error']}")
                else:
                    progress.add(name, outcome["seconds"])
        child.wait()
        job.unlink()
        if waiting:
            name = self.names(next(iter(waiting.values())))
            failed.append(f"{name}: the process ended with exit code {child.returncode}; {log} says why.")
        return failed

    def names(self, run: Run) -> str:
        """Names of the arms that have this run."""
        arms = [arm for arm in self.claims.arms if self.run(arm, run.seed).key == run.key]
        return f"{', '.join(arms)}, seed {run.seed}"


class Children:
    """Processes that were started and may have to end early."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen] = []
        self._over = False

    def start(self, program: Sequence[str], errors: Any) -> subprocess.Popen:
        """Start a process whose standard output is read by line. Raises RuntimeError when all have been ended."""
        if self._over:
            raise RuntimeError("the runs have been stopped")
        environment = os.environ | ENVIRONMENT
        child = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        self._started.append(child)
        return child

    def end(self) -> None:
        """End those that still run."""
        self._over = True
        for child in self._started:
            if child.poll() is None:
                child.kill()
                child.wait()


class Progress:
    """Lines about finished runs, with the time left."""

    def __init__(self, total: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._total = total
        self._say = say
        self._clock = clock
        self._begun = clock()
        self._done = 0
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        """Say that a run is finished, which took this long."""
        with self._lock:
            self._done += 1
            passed = self._clock() - self._begun
            left = passed / self._done * (self._total - self._done)
            self._say(f"{self._done}/{self._total}  {name}: {seconds:.1f} s; {clock_text(left)} left")


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def digest(value: Any) -> str:
    """Digest a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def code_digest() -> str:
    """Digest the package's sources."""
    found = hashlib.sha256()
    package = Path(mindrlhf.__file__).parent
    for path in sorted(path for path in package.rglob("*") if path.suffix in CODE):
        found.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return found.hexdigest()[:12]
