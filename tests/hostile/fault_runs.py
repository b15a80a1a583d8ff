"""Let every call that writes fail in turn, over whole runs with saves, and say where an answer is not as promised.

    gcc -O2 -shared -fPIC tests/hostile/faults.c -o /tmp/faults.so -ldl
    LD_PRELOAD=/tmp/faults.so python tests/hostile/fault_runs.py --library /tmp/faults.so --folder /tmp/faults

A run opens for writing, writes, syncs, renames and removes below its outputs; each of these calls fails once in a run
of its own, or with all later calls of its kind. Promised: the run ends with exit code 0 or 2, and one sentence with 2;
`--resume_training auto` then ends with the files of a run without faults, bit for bit (metrics but for times).
"""

import argparse
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import jobs
from hostile.sandbox import Child, Outcome, command

KINDS = {
    "open": errno.EACCES,
    "write": errno.ENOSPC,
    "sync": errno.EIO,
    "rename": errno.EIO,
    "unlink": errno.EACCES,
}
EACH_STEP = ("trainer.save_freq=1", "trainer.total_steps=2", "trainer.save_max_ckpt_num=1")
SMALL = ("data.prompts_per_step=2", "rollout.num_generations=2", "rollout.max_new_tokens=8")
VARIANTS = {
    "full": (*EACH_STEP, *SMALL),
    "async": (*EACH_STEP, *SMALL, "trainer.async_save=True"),
    "lora": (*EACH_STEP, *SMALL, "lora.rank=2", "lora.save=both"),
}
PROMISED = (0, 2)


@dataclass(frozen=True)
class Fault:
    """The number-th call of a kind fails, once or with all later ones."""

    kind: str
    number: int
    for_good: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.number}{' and later' if self.for_good else ''}"


class Faults:
    """The preloaded library."""

    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.faults_count.restype = ctypes.c_long

    def begin(self, folder: Path, fault: Fault | None = None) -> None:
        kinds = list(KINDS)
        chosen = (kinds.index(fault.kind), fault.number, fault.for_good, KINDS[fault.kind]) if fault else (-1, 0, 0, 0)
        kind, number, for_good, error = chosen
        self._library.faults_begin(
            str(folder).encode(), kind, ctypes.c_long(number), ctypes.c_int(for_good), ctypes.c_int(error)
        )

    def list_calls(self, file: Path) -> None:
        """Write each call's kind and path to a file from now on."""
        self._library.faults_list(str(file).encode())

    def counts(self) -> dict[str, int]:
        return {kind: self._library.faults_count(number) for number, kind in enumerate(KINDS)}


def digest(output: Path) -> dict[str, str]:
    """Every result of a run: weights, last checkpoint, rollouts, and metrics without times."""
    from mindrlhf.records.formats import read_record_rows

    found = {}
    last = max(output.glob("ckpt/step_*"))  # an older one may be left where the last save was the last thing done
    names = [*output.glob("ckpt/hf*/*"), *last.glob("rank_0/*"), *output.glob("rollouts/*.jsonl")]
    for path in names:
        if path.suffix in (".safetensors", ".jsonl"):
            found[str(path.relative_to(output))] = hashlib.sha256(path.read_bytes()).hexdigest()
    rows = [
        {name: repr(value) for name, value in row.items()} for row in read_record_rows(output / "rollouts.mindrecord")
    ]
    metrics = jobs.Run(output).kept_metrics
    for name, value in (("record", rows), ("metrics", metrics)):
        found[name] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return found


def judge(outcome: Outcome) -> list[str]:
    """What is not as promised about the end of a run."""
    reasons = [] if outcome.code in PROMISED else [f"exit code {outcome.code}"]
    lines = [line for line in outcome.err.splitlines() if line]
    if "Traceback" in outcome.err or "C++ Call Stack" in outcome.err + outcome.out:
        reasons.append("prints a traceback")
    if outcome.code == 2 and not (lines and lines[-1].startswith("mindrlhf train: ")):
        reasons.append("ends without a sentence")
    return reasons


class Sweep:
    """Runs of one job, each below a folder of its own."""

    def __init__(self, task: jobs.Task, folder: Path, variant: str, faults: Faults):
        self._task, self._folder, self._variant, self._faults = task, folder / variant, variant, faults
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        self.calls = self._folder / "calls.txt"

    def _run(self, output: Path, prepare: Callable[[], None], *flags: str, after: Callable[[], None] = lambda: None):
        argv = [str(part) for part in (*self._task.train(output, *VARIANTS[self._variant]), *flags)]

        def run() -> int:
            prepare()
            code = command(argv)()
            after()
            return code

        return Child(run, self._folder, self._folder / "log").wait()

    def reference(self) -> tuple[dict[str, str], dict[str, int]]:
        """Results and numbers of calls of a run without faults."""
        output, counted = self._folder / "sound", self._folder / "counts.json"
        begin = lambda: (self._faults.begin(output), self._faults.list_calls(self.calls))  # noqa: E731
        after = lambda: counted.write_text(json.dumps(self._faults.counts()))  # noqa: E731
        outcome = self._run(output, begin, after=after)
        assert outcome.code == 0, outcome
        return digest(output), json.loads(counted.read_text())

    def check(self, fault: Fault, expected: dict[str, str]) -> list[str]:
        """Run with a fault and resume; what is not as promised."""
        output = self._folder / "faulty"
        shutil.rmtree(output, ignore_errors=True)
        reasons = judge(outcome := self._run(output, lambda: self._faults.begin(output, fault)))
        if outcome.code != 0 or reasons:
            again = self._run(output, lambda: None, "--resume_training", "auto")
            if again.code != 0:
                reasons.append(f"does not resume: exit code {again.code}: {again.err[-300:]}")
        if not any(reason.startswith("does not resume") for reason in reasons):
            found = digest(output)
            reasons += [
                f"{name} differs" for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)
            ]
        if reasons:
            reasons.append(outcome.err[-600:])
        return reasons


def own_task(folder: Path) -> jobs.Task:
    """A task below a folder, which has the cache of its runs too; what runs import is imported, for forks."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    (folder / "cache").mkdir(parents=True, exist_ok=True)
    import mindrlhf.trainer.build  # noqa: F401

    if not (folder / "task").exists():
        made = Child(lambda: jobs.make_task(folder / "task") and 0, folder, folder / "task_log").wait()
        assert made.code == 0, made
    return jobs.Task(folder / "task")


def faults_of(counts: dict[str, int], every: int, first: int) -> Iterator[Fault]:
    """Each call of each kind, or every n-th from a first one on, once and for good."""
    for kind, count in counts.items():
        for number in range(first, count + 1, every):
            yield Fault(kind, number, False)
            yield Fault(kind, number, True)


def faults_of_sites(calls: Path) -> Iterator[Fault]:
    """The first and the last call of each kind on each path, where numbers in paths count as one; once and for good."""
    numbers: Counter[str] = Counter()
    sites: dict[tuple[str, str], list[int]] = {}
    for line in calls.read_text().splitlines():
        index, _, path = line.partition(" ")
        kind = list(KINDS)[int(index)]
        numbers[kind] += 1
        sites.setdefault((kind, re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "N", path)), []).append(numbers[kind])
    for (kind, _), found in sites.items():
        for number in sorted({found[0], found[-1]}):
            yield Fault(kind, number, False)
        yield Fault(kind, found[0], True)


def flags(description: str, variants: Iterable[str]) -> argparse.ArgumentParser:
    """The flags of a program that lets writing calls fail."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--library", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="only every n-th call of a kind")
    parser.add_argument("--first", type=int, default=1, help="the first call of a kind that fails")
    parser.add_argument("--variants", nargs="+", default=list(variants))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = flags("Writing calls that fail in turn.", VARIANTS)
    parser.add_argument("--sites", action="store_true", help="the first and last call on each path in place of all")
    parser.add_argument("--part", type=int, nargs=2, default=(1, 1), metavar=("K", "N"), help="only part K of N")
    args = parser.parse_args(argv)
    folder = args.folder.resolve()
    task, faults, bad, codes = own_task(folder), Faults(args.library), 0, Counter()
    for variant in args.variants:
        sweep = Sweep(task, folder, variant, faults)
        expected, counts = sweep.reference()
        print(f"{variant}: {counts}", flush=True)
        calls = faults_of_sites(sweep.calls) if args.sites else faults_of(counts, args.every, args.first)
        for fault in list(calls)[args.part[0] - 1 :: args.part[1]]:
            reasons = sweep.check(fault, expected)
            codes[variant] += 1
            bad += bool(reasons)
            if reasons:
                print(f"{variant}: {fault}: {reasons}", flush=True)
        print(f"{variant}: {codes[variant]} runs", flush=True)
    print(json.dumps({"runs": sum(codes.values()), "failures": bad}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
