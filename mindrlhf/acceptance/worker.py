"""Process that runs checks on the device, and writes their findings.

`python -m mindrlhf.acceptance.worker TASK`: a process by itself, or one of msrun's ranks. The parent process reads the
lines; what they lack, when this process has ended, was lost with it.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from mindrlhf.acceptance.checks import Check, Finding, Level, Trial
from mindrlhf.backend.devices import find_device
from mindrlhf.backend.process.launch import World, launch
from mindrlhf.files.printable import printable, shortened
from mindrlhf.metrics.performance import peak_resident_bytes
from mindrlhf.units import GIB

MOST_WORDS = 600  # characters of an error


@dataclass(frozen=True)
class Task:
    """Checks for a worker to run, in order.

    level, ranks: of the catalogue from which they are. folder: for lines (`lines_path`) and files. fault: to inject.
    """

    device: str
    level: Level
    ranks: int
    names: list[str]
    folder: str
    fault: str | None = None

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def read(cls, path: Path) -> "Task":
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def lines_path(self, rank: int) -> Path:
        """Name the file with a rank's lines."""
        return Path(self.folder) / f"rank_{rank}.jsonl"


def run(task: Task, world: World, out: TextIO) -> None:
    """Run the checks of a task; nothing that one raises stops the next."""
    from mindrlhf.acceptance.catalogue import all_checks
    from mindrlhf.acceptance.faults import injected

    device = find_device(task.device)
    checks = {check.name: check for check in all_checks(device, task.level, task.ranks)}
    trial = Trial(device, Path(task.folder), world)
    with injected(task.fault, device) if task.fault else nullcontext():
        for name in task.names:
            _write(out, begin=name)
            start = time.perf_counter()
            for finding in findings_of(checks[name], trial):
                _write(out, check=name, **asdict(finding))
            _write(out, end=name, seconds=time.perf_counter() - start, memory_gib=_memory_gib(trial))


def findings_of(check: Check, trial: Trial) -> Iterator[Finding]:
    """Yield a check's findings; an error that it raises is the last one."""
    try:
        yield from check.run(trial)
    except Exception as error:
        note = shortened(printable(f"{type(error).__name__}: {error}"), MOST_WORDS, " ")
        yield Finding("runs to its end", float("nan"), 0.0, note)


def _write(out: TextIO, **fields: Any) -> None:
    out.write(json.dumps(fields) + "\n")  # NaN as Python writes and reads it
    out.flush()


def _memory_gib(trial: Trial) -> float:
    """Measure the peak memory so far: the device's own, or this process's."""
    if trial.device.in_host_memory:
        return peak_resident_bytes() / GIB
    import mindspore

    return mindspore.runtime.max_memory_allocated() / GIB


def main(path: str) -> None:
    """Run the task in a file, as one of its ranks."""
    task = Task.read(Path(path))
    with launch(task.device) as world, task.lines_path(world.rank).open("a", encoding="utf-8") as out:
        run(task, world, out)


if __name__ == "__main__":
    main(sys.argv[1])
