"""Stop small runs by signals at random moments, and start two in one folder, by a seed.

    python tests/hostile/interrupted_runs.py --folder /tmp/interrupted --signals 100 --pairs 50

Promised: a run that gets SIGINT, SIGTERM or SIGHUP ends with exit code 0, or by a second SIGINT or SIGTERM at once;
`--resume_training auto` ends with the results of a run without signals, bit for bit. Of two runs in one folder one
goes on as if it were alone, and the other ends with exit code 2 and a sentence.
"""

import argparse
import json
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import jobs
from hostile.fault_runs import EACH_STEP, SMALL, digest, own_task
from hostile.sandbox import Child, Outcome, command

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STEPS = (*EACH_STEP, *SMALL, "trainer.total_steps=4")


def begin(task: jobs.Task, output: Path, name: str, *flags: str) -> Child:
    argv = [str(part) for part in (*task.train(output, *STEPS), *flags)]
    return Child(command(argv), output.parent, output.parent / name)


def stopped(task: jobs.Task, output: Path, rng: random.Random, most: float, expected: dict) -> tuple[str, list[str]]:
    """One run with a signal, in a third of the cases two, and its continuation; what is not as promised."""
    shutil.rmtree(output, ignore_errors=True)
    sent = rng.choice(SIGNALS)
    again = rng.choice(SIGNALS[:2]) if rng.random() < 1 / 3 else None
    child = begin(task, output, "log")
    time.sleep(rng.uniform(0, most))
    child.send(sent)
    if again:
        time.sleep(rng.uniform(0, 0.5))
        child.send(again)
    outcome = child.wait()
    what = f"{sent.name}{f' and {again.name}' if again else ''}: {outcome.code}"
    # A run that has not begun to listen, or has ended already, dies of its signal.
    allowed = (0, -sent, -again) if again else (0,) if "preflight" in outcome.out else (0, -sent, 130)
    reasons = [] if outcome.code in allowed else [f"exit code {outcome.code}: {outcome.err[-400:]}"]
    if "Traceback" in outcome.err and outcome.code != 130:
        reasons.append(f"prints a traceback: {outcome.err[-400:]}")
    last = begin(task, output, "log", "--resume_training", "auto").wait()
    if last.code != 0:
        return what, [*reasons, f"does not resume: {last.err[-400:]}"]
    found = digest(output)
    return what, reasons + [f"{name} differs" for name in expected | found if expected.get(name) != found.get(name)]


def pair(task: jobs.Task, output: Path, rng: random.Random, most: float, expected: dict) -> tuple[str, list[str]]:
    """Two runs in a folder, a random time apart."""
    shutil.rmtree(output, ignore_errors=True)
    first = begin(task, output, "first")
    time.sleep(rng.uniform(0, most) if rng.random() < 0.5 else rng.uniform(0, 0.1))
    second = begin(task, output, "second")
    outcomes: list[Outcome] = [first.wait(), second.wait()]
    codes = sorted(outcome.code for outcome in outcomes)
    said = [outcome.err.splitlines()[-1] for outcome in outcomes if outcome.code == 2 and outcome.err]
    reasons = [] if codes == [0, 2] else [f"exit codes {codes}: {outcomes}"]
    reasons += [line for line in said if not line.startswith("mindrlhf train: ")]
    found = digest(output)
    return str(codes), reasons + [f"{name} differs" for name in expected if expected[name] != found.get(name)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Signals at random moments, and two runs in one folder.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--signals", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.folder.resolve()
    task = own_task(folder)
    for name in ("first", "sound"):
        shutil.rmtree(folder / name, ignore_errors=True)
    begin(task, folder / "first", "log").wait()  # compiles the graphs
    started = time.monotonic()
    sound = begin(task, folder / "sound", "log").wait()
    assert sound.code == 0, sound.err
    expected, most, bad = digest(folder / "sound"), time.monotonic() - started, 0
    for name, count, one in (("signals", args.signals, stopped), ("pairs", args.pairs, pair)):
        seen: Counter[str] = Counter()
        for number in range(count):
            what, reasons = one(task, folder / "run", random.Random(f"{args.seed} {name} {number}"), most, expected)
            seen[what] += 1
            bad += bool(reasons)
            if reasons:
                print(f"{name} {number}: {what}: {reasons}", flush=True)
            if number % 10 == 9:
                print(f"{name}: {number + 1} done", flush=True)
        print(json.dumps({name: count, **seen}), flush=True)
    print(json.dumps({"failures": bad}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
