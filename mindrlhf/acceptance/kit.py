"""The kit: starts the processes that run the checks, and gathers their findings.

A check that hangs, or takes its process with it, is one failed row; another process goes on with the next check.
"""

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mindrlhf.acceptance.checks import PATIENCE_S, Check, Finding, Level, Trial
from mindrlhf.acceptance.worker import Task, findings_of
from mindrlhf.backend.device import Device
from mindrlhf.backend.process.start import ending, last_lines, module_command, running

POLL_S = 0.1
LOG_LINES = 3  # of a lost process, in its row
WORKER = "mindrlhf.acceptance.worker"


@dataclass
class Result:
    """Result of one check.

    memory_gib: peak of its process so far.
    """

    name: str
    level: Level
    ranks: int
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    memory_gib: float = 0.0

    @property
    def failed(self) -> list[Finding]:
        return [one for one in self.findings if not one.passed]

    @property
    def passed(self) -> bool:
        """True if there are findings and all passed."""
        return bool(self.findings) and not self.failed

    @property
    def worst(self) -> Finding | None:
        """The finding with the largest share of its tolerance.

        An error that is not a number comes first.
        """
        return max(self.findings, key=_share, default=None)


def _share(finding: Finding) -> float:
    if finding.error != finding.error:
        return float("inf")
    return finding.error / finding.tolerance if finding.tolerance else finding.error * 1e30


@dataclass(frozen=True)
class Kit:
    """Settings of a run of the kit.

    level, ranks: of the catalogue. folder: of everything that is written. fault: to inject, for tests of the kit.
    patience_s: seconds for one finding, and for one command of a check. tell: called with each result.
    """

    device: Device
    level: Level
    ranks: int
    folder: Path
    fault: str | None = None
    patience_s: float = PATIENCE_S
    tell: Callable[[Result], None] = lambda result: None

    def run(self, checks: Sequence[Check]) -> list[Result]:
        """Run the checks in their order, neighbours of as many ranks in one process."""
        results = []
        for (alone, _), members in groupby(checks, key=lambda one: (one.alone, one.ranks)):
            for result in self._alone(list(members)) if alone else self._in_workers(list(members)):
                results.append(result)
                self.tell(result)
        return results

    def _alone(self, checks: Sequence[Check]) -> Iterator[Result]:
        """Run checks that start processes of their own."""
        for check in checks:
            start = time.perf_counter()
            trial = Trial(self.device, self.folder / "runs", fault=self.fault, patience_s=self.patience_s)
            found = list(findings_of(check, trial))
            yield Result(check.name, check.level, check.ranks, found, time.perf_counter() - start)

    def _in_workers(self, checks: Sequence[Check]) -> Iterator[Result]:
        """Run checks in workers, a new one whenever one is lost."""
        waiting = list(checks)
        number = 0
        while waiting:
            folder = self.folder / "workers" / f"{waiting[0].ranks}_{len(waiting)}_{number}"
            folder.mkdir(parents=True)
            results = self._one_start(waiting, folder)
            yield from results
            waiting = waiting[len(results) :]
            number += 1

    def _one_start(self, checks: Sequence[Check], folder: Path) -> list[Result]:
        """Start workers for these checks.

        Returns results of the first of them, at least of one.
        """
        ranks = checks[0].ranks
        names = [check.name for check in checks]
        task = Task(self.device.name, self.level, self.ranks, names, str(folder), self.fault)
        log = folder / "worker.log"
        command = module_command(WORKER, [task.write(folder / "task.json")], ranks, folder)
        with log.open("w") as out, running(command, out) as process:
            reason = self._wait(process, task, ranks)
        lines = [_lines(task.lines_path(rank)) for rank in range(ranks)]
        done = min(sum("end" in line for line in of_rank) for of_rank in lines)
        results = [_result(check, lines) for check in checks[:done]]
        if done < len(checks):
            logs = [*(folder / f"worker_{rank}.log" for rank in range(ranks) if ranks > 1), folder / "worker.log"]
            note = f"{reason}; {last_lines(logs, LOG_LINES)}"
            # Workers that did not even begin would not begin for the other checks either.
            begun = any(of_rank for of_rank in lines)
            for check in checks[done : done + 1] if begun else checks[done:]:
                lost = _result(check, lines)
                lost.findings.append(Finding("runs to its end", float("nan"), 0.0, note))
                results.append(lost)
        return results

    def _wait(self, process: subprocess.Popen, task: Task, ranks: int) -> str:
        """Wait for the workers' end, or a check that takes too long; returns which."""
        seen = -1
        since = time.monotonic()
        while process.poll() is None:
            count = sum(_line_count(task.lines_path(rank)) for rank in range(ranks))
            if count != seen:
                seen = count
                since = time.monotonic()
            if time.monotonic() - since > self.patience_s:
                return f"no finding for {self.patience_s:g} s, and the process was stopped"
            time.sleep(POLL_S)
        return f"the process {ending(process.returncode)}"


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read a rank's lines; a line that its end has cut is not one."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def _line_count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _result(check: Check, lines: Sequence[Sequence[dict[str, Any]]]) -> Result:
    """Gather the findings of all ranks in a check.

    Of each part the rank with the largest error counts.
    """
    result = Result(check.name, check.level, check.ranks)
    worst: dict[str, Finding] = {}
    for rank, of_rank in enumerate(lines):
        for line in of_rank:
            if line.get("end") == check.name:
                result.seconds = max(result.seconds, line["seconds"])
                result.memory_gib = max(result.memory_gib, line["memory_gib"])
            if line.get("check") != check.name:
                continue
            finding = Finding(**{name: line[name] for name in ("part", "error", "tolerance", "note")})
            if len(lines) > 1 and not finding.passed:
                finding = replace(finding, note=f"on rank {rank}; {finding.note}".strip("; "))
            known = worst.get(finding.part)
            if known is None or _share(finding) > _share(known):
                worst[finding.part] = finding
    result.findings = list(worst.values())
    return result
