"""Guards against lost speed: the working tree and another revision run the same GRPO steps in turn.

python benchmarks/guard.py                                  # against main: about ten minutes on two quiet cores
python benchmarks/guard.py --old v0.2 --job wide --rounds 6
python benchmarks/guard.py --dtype bfloat16 rollout.weights=int8

Each round is one run of `grpo_step.py` of both, in alternating order; `compare.py` says which rounds count. Of each job
it prints the ratios new / old of the median step, of generation, log-probs and training, of memory and of the time to
the first step: the geometric mean over rounds and, for the step, its 95% t-interval.

Exit code 1: some step is slower for sure, its interval lies above --limit. 3: the machine was too busy to tell.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).with_name("claims")))

from compare import WARMUP, BusyError, Run, Side, middle, quiet_rounds
from comparison_jobs import JOBS, ComparedJob
from verdict import paired_difference

from mindrlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MAIN = ("reference", "long-prompt", "large-vocabulary")
NEW, OLD = "new", "old"
PARTS = ("gen", "logprob", "train", "memory", "start_to_first_step_s")
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
                outcomes.append(outcome(name, quiet_rounds(args, JOBS[name], sides)))
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
    flags = [word for pair in given.items() for word in pair] + ["--fixed-length"] * job.fixed_length
    command = [sys.executable, str(tree / "benchmarks" / "grpo_step.py"), *flags, "--quiet"]
    return Side(name, lambda path: [*command, "--json", str(path), *args.overrides])


def outcome(job: str, rounds: Sequence[Mapping[str, Run]]) -> Outcome:
    """Judge a job's rounds."""
    by_side = {name: [middle([made[name].result]) for made in rounds] for name in (OLD, NEW)}

    def logs(name: str, part: str) -> list[float]:
        return [math.log(one[part]) for one in by_side[name]]

    step = paired_difference(logs(OLD, "step"), logs(NEW, "step"))
    both = [part for part in PARTS if all(one.get(part) for of_side in by_side.values() for one in of_side)]
    parts = {part: math.exp(paired_difference(logs(OLD, part), logs(NEW, part)).mean) for part in both}
    old, new = (middle([made[name].result for made in rounds])["step"] for name in (OLD, NEW))
    ratios = [math.exp(value) for value in (step.mean, step.low, step.high)]
    return Outcome(job, old=old, new=new, step=ratios[0], low=ratios[1], high=ratios[2], parts=parts)


if __name__ == "__main__":
    sys.exit(main())
