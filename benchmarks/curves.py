"""Trains a model by this suite and by the peer on the same rows, and compares reward by step and accuracy by hour.

python benchmarks/curves.py --peer-python ENV/bin/python --model out/real_0/model/smollm2 \
    --train out/real_0/data/train.mindrecord --test out/real_0/data/test.mindrecord --steps 60 --seed 0 --seed 1

The peer is TRL (`peer_curve.py`), whose environment needs `requests` and, for the reward, `pydantic` too. Both sides
have the same weights, prompts in the same order, reward, numbers of prompts and samples, sampling, learning rate and
AdamW, no KL term and no filter of groups; only the random numbers differ. All models, at the start and after every
--measure-every steps, answer the same held-out problems by `mindrlhf eval`; time is that of training steps alone. Sides
take turns, the other one first in every second seed. What is finished stays in --output and is not made again:
`results.json`, which is printed too, and `curves.png`. Exit code 1 where the peer's mean reward over the last half of
the steps differs from ours by more than seeds do, and chance.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.evaluation.pass_at_k import interval

OURS, PEER = "ours", "peer"
COLOURS = {OURS: "#0072B2", PEER: "#E69F00"}  # Okabe and Ito 2008
SMOOTHED = 5  # steps of a moving mean in the figure
SETTINGS = (
    *("algorithm.beta=0", "optimizer.weight_decay=0", "optimizer.max_grad_norm=1", "optimizer.warmup_steps=0"),
    "optimizer.beta2=0.999",  # TRL's, whose other moments are ours
    *("data.shuffle=False", "train.length_bucket=16", "reward.functions=[{name: gsm8k}]", "trainer.loggers=[jsonl]"),
    "rollout.max_slots=64",
)


@dataclass(frozen=True)
class Curve:
    """One run: mean reward and seconds of each step, and (step, right answers, problems) of each measurement."""

    rewards: Sequence[float]
    seconds: Sequence[float]
    measured: Sequence[tuple[int, int, int]]

    def minutes(self, step: int) -> float:
        """Return the minutes of training up to a step."""
        return sum(self.seconds[:step]) / 60


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="interpreter of the peer's environment")
    parser.add_argument("--peer-dtype", default="bf16-autocast", help="see peer_curve.py (default: %(default)s)")
    parser.add_argument("--model", type=Path, required=True, help="HF folder")
    parser.add_argument("--train", type=Path, required=True, help="prompt MindRecord")
    parser.add_argument("--test", type=Path, required=True, help="prompt MindRecord of held-out problems")
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--measure-every", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seed", type=int, action="append", help="may be given several times (default: 0 and 1)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--lr", default="1e-5", help="default: %(default)s")
    parser.add_argument("--temperature", default="0.7", help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=2, help="of either side's operators (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("out/curves"), help="default: %(default)s")
    args = parser.parse_args()
    # This process has imported MindSpore, which sets OMP_NUM_THREADS to 1 for what is begun from here.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    args.seed = args.seed or [0, 1]
    return args


def main() -> int:
    args = arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    write_rows(args)
    first = accuracy(args, args.model, args.output / "start")
    found: dict[str, list[Curve]] = {OURS: [], PEER: []}
    runs = {OURS: run_ours, PEER: run_peer}
    for number, seed in enumerate(args.seed):
        for side in list(runs)[:: -1 if number % 2 else 1]:
            folder = args.output / f"{side}_{seed}"
            done = folder / "curve.json"
            if not done.exists():
                folder.mkdir(exist_ok=True)
                curve = runs[side](args, seed, folder, (0, *first))
                done.write_text(json.dumps(vars(curve)), encoding="utf-8")
            found[side].append(Curve(**json.loads(done.read_text(encoding="utf-8"))))
    figures = compared(found)
    (args.output / "results.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(found, args.output / "curves.png")
    print(json.dumps(figures, indent=1))
    return 0 if figures["in_one_band"] else 1


def write_rows(args: argparse.Namespace) -> None:
    """Write the peer's rows: the prompts of the MindRecord as text, in its order."""
    tokenizer = Tokenizer.from_path(args.model)
    with (args.output / "rows.jsonl").open("w", encoding="utf-8") as file:
        for prompt in read_prompts(args.train, tokenizer):
            text = tokenizer.decode(list(prompt.token_ids))
            assert tokenizer.encode(text) == list(prompt.token_ids), "the peer would read other tokens"
            file.write(json.dumps({"prompt": text, "ground_truth": prompt.fields["ground_truth"]}) + "\n")


def run_ours(args: argparse.Namespace, seed: int, folder: Path, first: tuple[int, int, int]) -> Curve:
    """Train by this suite, as many steps at a time as lie between measurements."""
    ends = range(args.measure_every, args.steps + 1, args.measure_every)
    measured = [first]
    for end in ends:
        run = [sys.executable, "-m", "mindrlhf", "train", "--load_sft_checkpoint_infer", str(args.model)]
        run += ["--mind_dataset_dir", str(args.train), "--save_ckpt_dir", str(folder / "ckpt"), *SETTINGS]
        run += ["--output_dir", str(folder), "--resume_training", "auto", f"seed={seed}", f"optimizer.lr={args.lr}"]
        run += ["train_yaml.model.model_config.compute_dtype=auto", "infer_yaml.model.model_config.compute_dtype=auto"]
        run += [f"rollout.temperature={args.temperature}", f"rollout.max_new_tokens={args.max_new_tokens}"]
        run += ["data.prompts_per_step=8", "rollout.num_generations=8", f"trainer.total_steps={end}"]
        subprocess.run([*run, f"trainer.save_freq={args.measure_every}", "trainer.save_max_ckpt_num=1"], check=True)
        measured.append((end, *accuracy(args, folder / "ckpt/hf", folder / f"step_{end}")))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "critic/rewards/mean" in row]
    seconds = [row["timing_s/step"] - row.get("timing_s/compile", 0.0) for row in steps]
    return Curve([row["critic/rewards/mean"] for row in steps], seconds, measured)


def run_peer(args: argparse.Namespace, seed: int, folder: Path, first: tuple[int, int, int]) -> Curve:
    """Train by the peer; its models are measured afterwards, and removed."""
    script = Path(__file__).with_name("peer_curve.py")
    run = [args.peer_python, str(script), "--model", str(args.model), "--rows", str(args.output / "rows.jsonl")]
    run += ["--steps", str(args.steps), "--measure-every", str(args.measure_every), "--output", str(folder)]
    run += ["--seed", str(seed), "--max-new-tokens", str(args.max_new_tokens), "--lr", args.lr]
    run += ["--temperature", args.temperature, "--dtype", args.peer_dtype]
    run += ["--threads", str(args.threads)]
    (folder / "steps.jsonl").unlink(missing_ok=True)
    subprocess.run(run, check=True, env={**os.environ, "PYTHONPATH": ""})
    steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = range(args.measure_every, args.steps + 1, args.measure_every)
    measured = [(end, *accuracy(args, folder / f"step_{end}", folder / f"step_{end}_eval")) for end in ends]
    return Curve([row["reward"] for row in steps], [row["seconds"] for row in steps], [first, *measured])


def accuracy(args: argparse.Namespace, model: Path, name: Path) -> tuple[int, int]:
    """Answer the held-out problems greedily; returns the numbers of right answers and of problems."""
    kept = name.with_suffix(".json")
    if not kept.exists():
        run = [sys.executable, "-m", "mindrlhf", "eval", "--model", str(model), "--data", str(args.test)]
        run += ["--slots", "256", "--max_new_tokens", str(args.max_new_tokens), "--output", str(name) + ".jsonl"]
        printed = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout
        kept.write_text(printed.strip().splitlines()[-1], encoding="utf-8")
    summary = json.loads(kept.read_text(encoding="utf-8"))
    return round(summary["accuracy"] * summary["problems"]), summary["problems"]


def compared(found: Mapping[str, Sequence[Curve]]) -> dict[str, Any]:
    """Compare both sides: rewards over the last half of the steps, and hours to the accuracy that both reach."""
    halves = {side: [np.mean(one.rewards[len(one.rewards) // 2 :]) for one in curves] for side, curves in found.items()}
    means = {side: float(np.mean(values)) for side, values in halves.items()}
    spread = max(float(np.ptp(values)) for values in halves.values())
    # Answers of one seed differ by chance too: four standard errors of a mean of so many answers.
    answers = 64 * sum(len(one.rewards) // 2 for one in found[OURS])
    error = 4 * (means[OURS] * (1 - means[OURS]) * 2 / answers) ** 0.5
    reached = min(max(right / of for _, right, of in one.measured) for curves in found.values() for one in curves)
    minutes = {side: [to_accuracy(one, reached) for one in curves] for side, curves in found.items()}
    return {
        "reward_of_last_half": {side: [round(float(value), 4) for value in values] for side, values in halves.items()},
        "difference": round(means[OURS] - means[PEER], 4),
        "seeds_differ": round(spread, 4),
        "chance": round(error, 4),
        "in_one_band": bool(abs(means[OURS] - means[PEER]) <= max(spread, error)),
        "seconds_a_step": {
            side: float(np.median([second for one in curves for second in one.seconds]))
            for side, curves in found.items()
        },
        "accuracy": {side: [one.measured for one in curves] for side, curves in found.items()},
        "intervals": {
            side: [[round(end, 3) for end in interval(*one.measured[-1][1:])] for one in curves]
            for side, curves in found.items()
        },
        "accuracy_of_both": round(reached, 4),
        "minutes_to_it": minutes,
        "time_ratio": round(float(np.mean(minutes[OURS]) / np.mean(minutes[PEER])), 3),
    }


def to_accuracy(curve: Curve, accuracy: float) -> float:
    """Return the minutes to an accuracy, straight between measurements."""
    points = [(curve.minutes(step), right / of) for step, right, of in curve.measured]
    for (before, low), (after, high) in itertools.pairwise(points):
        if high >= accuracy:
            share = 1.0 if high == low else max(0.0, (accuracy - low) / (high - low))
            return round(before + share * (after - before), 2)
    return round(points[-1][0], 2)


def draw(found: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw reward by step, with a band over seeds, and accuracy by minutes of training."""
    figure = Figure(figsize=(10, 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for side, curves in found.items():
        steps = min(len(one.rewards) for one in curves)
        kernel = np.ones(SMOOTHED) / SMOOTHED
        smooth = np.array([np.convolve(one.rewards[:steps], kernel, "valid") for one in curves])
        at = np.arange(SMOOTHED, steps + 1)
        left.fill_between(at, smooth.min(0), smooth.max(0), color=COLOURS[side], alpha=0.25, linewidth=0)
        seeds = "seeds" if len(curves) > 1 else "seed"
        left.plot(at, smooth.mean(0), color=COLOURS[side], label=f"{side}, {len(curves)} {seeds}")
        for number, one in enumerate(curves):
            minutes = [one.minutes(step) for step, _, _ in one.measured]
            shares = np.array([(right_ / of, *interval(right_, of)) for _, right_, of in one.measured])
            errors = np.abs(shares[:, 1:] - shares[:, :1]).T
            label = side if number == 0 else None
            right.errorbar(minutes, shares[:, 0], errors, color=COLOURS[side], marker="o", capsize=2, label=label)
    left.set(xlabel="step", ylabel=f"mean reward, mean of {SMOOTHED} steps; band: seeds")
    right.set(xlabel="minutes of training", ylabel="held-out accuracy, 95% interval")
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)


if __name__ == "__main__":
    sys.exit(main())
