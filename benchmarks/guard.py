"""Guards against lost speed: the working tree and another revision run the same GRPO steps in turn.

python benchmarks/guard.py                                  # against main: about ten minutes on two quiet cores
python benchmarks/guard.py --old v0.2 --job wide --rounds 6
python benchmarks/guard.py --dtype bfloat16 rollout.weights=int8

Each round is one run of `grpo_step.py` of both. Once each has done its first step they take turns, a step each, so that
a machine whose rate changes within a minute changes it for both; `compare.py` says which rounds count. Of each job it
prints the ratios new / old of a step, of generation, log-probs and training (the median of a round's pairs of steps),
of memory and of the time to the first step: the geometric mean over rounds and, for the step, its 95% t-interval.
Both are in memory at once; with --whole-runs they run one after the other.

Exit code 1: some step is slower for sure, its interval lies above --limit. 3: the machine was too busy to tell.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).with_name("claims")))

from compare import WARMUP, BusyError, Run, Side, failed, middle, model_of, quiet_rounds
from comparison_jobs import JOBS, ComparedJob
from grpo_step import summarise
from verdict import paired_difference

from mindrlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
GATE = Path(__file__).with_name("gated_step.py")
MAIN = ("reference", "long-prompt", "large-vocabulary")
NEW, OLD = "new", "old"
STEP_PARTS = ("step", "gen", "logprob", "train")
PARTS = (*STEP_PARTS[1:], "memory", "start_to_first_step_s")
HEADINGS = ("job", "old", "new", "step new / old", "95% interval", *PARTS[:-1], "first step")


@dataclass(frozen=True)
class Outcome:
    """Median seconds of a step; ratios new / old, of the step with its interval, and of its parts by name."""

    job: str
    old: float
    new: float
    step: float
    low: float
    high: float
    parts: Mapping[str, float]

    @property
    def row(self) -> list[str]:
        interval = f"{self.low:.3f} to {self.high:.3f}"
        parts = [f"{self.parts[name]:.2f}" if name in self.parts else "" for name in PARTS]
        return [self.job, f"{self.old:.3f} s", f"{self.new:.3f} s", f"{self.step:.3f}", interval, *parts]


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="group.key=value", help="settings of both sides' runs")
    parser.add_argument("--old", default="main", help="revision to compare with (default: %(default)s)")
    names = [name for name, job in JOBS.items() if not job.end_probability]  # that one needs the peer's model
    parser.add_argument("--job", action="append", choices=names, help=f"may be repeated (default: {', '.join(MAIN)})")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products")
    parser.add_argument("--rounds", type=int, default=4, help="2 to 20 (default: 4)")
    parser.add_argument("--tries", type=int, default=12, help="rounds at most, with those not judged (default: 12)")
    parser.add_argument(
        "--whole-runs", action="store_true", help="for jobs of which two do not fit into memory at once"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-others", type=float, default=0.15, help="cores that other processes may use")
    parser.add_argument("--limit", type=float, default=1.02, help="ratio of a step that is slower (default: 1.02)")
    return parser.parse_intermixed_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    outcomes = []
    try:
        with tree_of(args.old) as old, tempfile.TemporaryDirectory() as folder:
            args.output = Path(folder)
            for name in args.job or MAIN:
                sides = [side(NEW, ROOT, JOBS[name], args), side(OLD, old, JOBS[name], args)]
                run = whole_runs if args.whole_runs else take_turns
                outcomes.append(outcome(name, quiet_rounds(args, JOBS[name], sides, run)))
                print(" | ".join(outcomes[-1].row), flush=True)
    except UserError as error:
        print(f"guard: {error}", file=sys.stderr)
        return 2
    except BusyError as error:
        print(f"guard: {error}", file=sys.stderr)
        return 3
    lines = [HEADINGS, ["---"] * len(HEADINGS), *(one.row for one in outcomes)]
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))
    slower = [one.job for one in outcomes if one.low > args.limit]
    if slower:
        print(f"slower than {args.old}: {', '.join(slower)}")
    return 1 if slower else 0


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Check a revision out in a folder of its own. Raises UserError if git cannot."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run([*git, "add", "--detach", str(tree), revision], capture_output=True, text=True)
        if made.returncode:
            raise UserError(f"--old {revision}: git cannot check it out ({made.stderr.strip().splitlines()[-1]}).")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def side(name: str, tree: Path, job: ComparedJob, args: argparse.Namespace) -> Side:
    """One tree's side of a job; the script finds the package beside itself."""
    given = {**job.model, **job.work, "--micro-batch": str(job.tokens), "--dtype": args.dtype}
    given |= {"--steps": str(job.steps), "--warmup": str(WARMUP), "--threads": str(args.threads)}
    given |= {"--max-others": str(args.max_others), "--family": job.family}
    if job.sees:
        given["--load"] = str(model_of(args, "sees", job))
    flags = [word for pair in given.items() for word in pair] + ["--fixed-length"] * job.fixed_length
    command = [sys.executable, str(GATE), str(tree / "benchmarks" / "grpo_step.py"), *flags, "--quiet"]
    return Side(name, lambda path: [*command, "--json", str(path), *args.overrides])


class Turns(AbstractContextManager):
    """A running side of a round that does a step at a time; it has done the first one when this is made."""

    def __init__(self, side: Side, path: Path):
        self.name, self._path = side.name, path
        self._errors = path.with_suffix(".log")
        path.unlink(missing_ok=True)
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                side.command(path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._wait()
        self.step()

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def step(self) -> bool:
        """Do a step; returns False at the end. Raises UserError if the process fails."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._wait()

    def result(self) -> dict[str, Any]:
        return json.loads(self._path.read_text())

    def _wait(self) -> bool:
        """Wait until it is ready for its next step, or has ended well."""
        for line in self._process.stdout:
            if line == "ready\n":
                return True
        if code := self._process.wait():
            raise failed(self.name, code, self._errors.read_text())
        return False


def take_turns(order: Sequence[Side], path: Path) -> dict[str, Run]:
    """Run the sides of a round, a step each in turn.

    Their results hold the steps in which nothing disturbed either of them.
    """
    with ExitStack() as stack:
        turns = [stack.enter_context(Turns(side, path.with_name(f"{side.name}.json"))) for side in order]
        going = True
        while going:
            for one in turns:
                going = one.step()
            turns.reverse()
        return in_pairs({one.name: one.result() for one in turns})


def whole_runs(order: Sequence[Side], path: Path) -> dict[str, Run]:
    """Run the sides of a round one after the other."""
    results = {}
    for side in order:
        with Turns(side, path) as one:
            while one.step():
                pass
            results[side.name] = one.result()
    return in_pairs(results)


def in_pairs(results: Mapping[str, dict[str, Any]]) -> dict[str, Run]:
    """Keep the steps that both sides did undisturbed."""
    limit = next(iter(results.values()))["args"]["max_others"]
    steps = zip(*(result["per_step"][WARMUP:] for result in results.values()), strict=True)
    pairs = [pair for pair in steps if all(row["others"] <= limit and not row["compile"] for row in pair)]
    made = {}
    for place, (name, result) in enumerate(results.items()):
        rows = [pair[place] for pair in pairs]
        made[name] = Run(
            {**result, "per_step": rows, "clean_steps": 0, **(summarise(rows, 0, limit) if rows else {})}, 0.0
        )
    return made


def outcome(job: str, rounds: Sequence[Mapping[str, Run]]) -> Outcome:
    """Judge a job's rounds."""
    by_side = {name: [middle([made[name].result]) for made in rounds] for name in (OLD, NEW)}

    def logs(part: str) -> list[float]:
        """Return the ratio's logarithm of each round; of a part of a step it is the median over the pairs of steps."""
        if part not in STEP_PARTS:
            pairs = zip(by_side[OLD], by_side[NEW], strict=True)
            return [math.log(new[part] / old[part]) for old, new in pairs]
        rows = [zip(made[OLD].result["per_step"], made[NEW].result["per_step"], strict=True) for made in rounds]
        return [statistics.median(math.log(new[part] / old[part]) for old, new in pairs) for pairs in rows]

    step = paired_difference([0.0] * len(rounds), logs("step"))
    both = [part for part in PARTS if all(one.get(part) for of_side in by_side.values() for one in of_side)]
    parts = {part: math.exp(statistics.fmean(logs(part))) for part in both}
    old, new = (middle([made[name].result for made in rounds])["step"] for name in (OLD, NEW))
    ratios = [math.exp(value) for value in (step.mean, step.low, step.high)]
    return Outcome(job, old=old, new=new, step=ratios[0], low=ratios[1], high=ratios[2], parts=parts)


if __name__ == "__main__":
    sys.exit(main())
