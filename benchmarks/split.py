"""Times steps of ranks that train beside ranks that generate, and of one process that does both.

python benchmarks/split.py --rounds 3
python benchmarks/split.py --calls 0 -- --hidden 512 --layers 8 --prompts 4

together: one process with two threads, `trainer.staleness=0`. apart: one rank for each side with one thread,
`trainer.staleness` of --staleness and `trainer.scoring_ranks` of --scoring-ranks. A step's rewards wait for a judge
that takes --latency seconds a call, --calls times one after the other; with --calls 0 there is none. Of each round both
run in turn, as whole jobs. Medians are over the steps but the first two, in which graphs are built, and the last, for
which nothing more is drawn.

ratio: apart over together. wait: shares of a step in which a side waits. plan: what `mindrlhf plan` says of these
shares before, without the judge; it says nothing of jobs of a few seconds. The goals are ratios of 0.65 with a judge or
tools of 300 ms a call and 1.10 without, and generators that wait in less than 0.15 of a step where the plan says so.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import grpo_step
from sleeping_judge import CALLS, SECONDS
from work import prepare

from mindrlhf.backend.process.start import free_port
from mindrlhf.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
DRIVER = ROOT / "examples/qwen_grpo_tutorial/grpo_one_stage.py"
JUDGE = Path(__file__).with_name("sleeping_judge.py")
WARMUP = 2
SIDES = {"together": (2, 1), "apart": (1, 2)}  # threads of a process, processes
COLUMNS = {
    "step": "timing_s/step",
    "gen": "timing_s/gen",
    "train": "timing_s/update_actor",
    "trainers wait": "trainer/idle_ratio",
    "generators wait": "generator/idle_ratio",
    "weights": "perf/weight_sync_s",
}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="of both sides in turn (default 3)")
    add("--calls", type=int, default=3, help="of the judge in a step, one after the other (default 3)")
    add("--latency", type=float, default=0.3, help="seconds of a call (default 0.3)")
    add("--workers", type=int, default=2, help="processes of the judge: as many steps are judged at once (default 2)")
    add("--staleness", type=int, default=2, help="of ranks apart (default 2)")
    add("--scoring-ranks", default="infer", help="of ranks apart: train or infer (default infer)")
    add("--steps", type=int, default=10, help="of each job (default 10)")
    add("--json", type=Path, help="write the result here")
    add("flags", nargs="*", help="behind --: of grpo_step.py, for the model and the numbers of prompts and samples")
    return parser.parse_args(argv)


def run(side: str, train: Sequence[str], folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Run one job; returns medians of its steps. Raises UserError if it fails."""
    threads, ranks = SIDES[side]
    settings = apart_settings(args) if ranks > 1 else ["trainer.staleness=0"]
    out = folder / side
    words = [str(DRIVER), *train, *settings]
    words += ["--save_ckpt_dir", str(out / "ckpt"), "--output_dir", str(out)]
    start = [sys.executable]
    if ranks > 1:
        start = [str(Path(sys.executable).with_name("msrun")), f"--worker_num={ranks}", f"--local_worker_num={ranks}"]
        start += ["--join=True", f"--log_dir={out / 'log'}", f"--master_port={free_port()}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # msrun starts its `python`
    given = {"OMP_NUM_THREADS": str(threads), "PATH": path, CALLS: str(args.calls), SECONDS: str(args.latency)}
    called(side, [*start, *words], given)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("step")][WARMUP:-1]
    return {name: statistics.median(row.get(key, 0.0) for row in rows) for name, key in COLUMNS.items()}


def apart_settings(args: argparse.Namespace) -> list[str]:
    ranks = ["--trainer_ranks", "1", "--generator_ranks", "1"]
    return [*ranks, f"trainer.staleness={args.staleness}", f"trainer.scoring_ranks={args.scoring_ranks}"]


def called(name: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run a command; returns its output. Raises UserError if it fails."""
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{name}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def planned(train: Sequence[str], args: argparse.Namespace) -> dict[str, float]:
    """Return the plan's shares of waiting ranks by side; empty for a job that is too short for a forecast."""
    command = [sys.executable, "-m", "mindrlhf", "plan", *train, *apart_settings(args), "--json"]
    given = {"OMP_NUM_THREADS": str(SIDES["apart"][0]), "PYTHONPATH": str(ROOT)}
    division = json.loads(called("plan", command, given))["division"]
    return division["given"]["idle"] if division else {}


def measure(args: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, dict[str, float]]]]:
    """Ask the plan, and run both sides in turn."""
    shape = grpo_step.arguments(["--steps", str(args.steps), *args.flags])
    rounds = []
    with tempfile.TemporaryDirectory(prefix="split_") as place:
        train = [*prepare(shape, Path(place)).train, f"trainer.total_steps={args.steps}"]
        if args.calls:
            judge = json.dumps([{"name": f"{JUDGE}:judged"}])
            train = [*train, f"reward.functions={judge}", f"reward.workers={args.workers}"]
        forecast = planned(train, args)
        for number in range(args.rounds):
            order = list(SIDES)[:: -1 if number % 2 else 1]
            folder = Path(place, f"round_{number}")
            rounds.append({side: run(side, train, folder, args) for side in order})
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return forecast, rounds


def table(
    forecast: Mapping[str, float], rounds: Sequence[dict[str, dict[str, float]]], args: argparse.Namespace
) -> str:
    """Format each round, the medians over rounds, and the forecast."""
    judge = f"{args.calls} calls of {args.latency:g} s to a judge" if args.calls else "no judge"
    lines = [
        f"{judge}; {args.steps} steps; apart: staleness {args.staleness}, scoring_ranks {args.scoring_ranks}",
        "round  side      " + "".join(f"{name:>16}" for name in COLUMNS) + "   ratio",
    ]

    def add(label: str, sides: dict[str, dict[str, float]]) -> None:
        for side in SIDES:
            cells = "".join(f"{sides[side][name]:16.3f}" for name in COLUMNS)
            ratio = f"{sides['apart']['step'] / sides['together']['step']:8.2f}" if side == "apart" else ""
            lines.append(f"{label:>6} {side:<10}{cells}{ratio}")

    for number, sides in enumerate(rounds, 1):
        add(str(number), sides)
    middle = {side: {name: statistics.median(one[side][name] for one in rounds) for name in COLUMNS} for side in SIDES}
    add("median", middle)
    if forecast:
        waits = {"trainers wait": forecast["train"], "generators wait": forecast["infer"]}
        cells = "".join(f"{waits[name]:16.3f}" if name in waits else " " * 16 for name in COLUMNS)
        lines.append(f"  plan {'apart':<10}{cells}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        forecast, rounds = measure(args)
    except UserError as error:
        print(f"split: {error}", file=sys.stderr)
        return 2
    if args.json:
        args.json.write_text(json.dumps({"forecast": forecast, "rounds": rounds}, indent=1))
    print(table(forecast, rounds, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
