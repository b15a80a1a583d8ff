"""`mindrlhf synthesize`: made-up problems and a small tokenizer for a first run."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindrlhf.data.tasks import arithmetic, calculator, countdown, digits, get_task, multiplication
from mindrlhf.data.tasks.task import Task
from mindrlhf.data.tokenizer import train_tokenizer
from mindrlhf.environments.ready import games
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_files

DEMONSTRATIONS = {
    "arithmetic": arithmetic.demonstrations,
    "countdown": countdown.demonstrations,
    "calculator": calculator.demonstrations,
    "digits": digits.demonstrations,
}
SHOWN = "digits"  # the task with images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--task",
        choices=("arithmetic", "calculator", "countdown", SHOWN, "multiplication", *games.GAMES),
        default="arithmetic",
    )
    add("--output_dir", required=True, help="folder for train.jsonl, test.jsonl and tokenizer files")
    add("--train_size", type=int, default=4000, help="problems in train.jsonl (default 4000)")
    add("--test_size", type=int, default=400, help="held-out problems in test.jsonl (default 400)")
    add("--seed", type=int, default=0, help="the same seed writes the same files (default 0)")
    add("--max_number", type=int, default=99, help="largest number in a problem (default 99)")
    add("--operations", default="+-*", help="arithmetic: which of + - * (default all)")
    add("--two_step_share", type=float, default=0.5, help="arithmetic: fraction of two-step problems (default 0.5)")
    careless = (
        "also write demonstrations.jsonl, worked answers (calculator: conversations) of which this fraction is "
        "careless (default 0: no file)"
    )
    add("--careless_share", type=float, default=0.0, help=careless)
    add("--operands", type=int, nargs="+", default=[3, 4], help="countdown: how many numbers (default 3 4)")
    add("--tokenizer_vocab_size", type=int, help="also train a tokenizer of this size on the training problems")


def run(args: argparse.Namespace) -> None:
    """Write the files and print their names."""
    _validate(args)
    generate, special = {
        "arithmetic": (arithmetic.generate, (args.max_number, args.operations, args.two_step_share)),
        "calculator": (calculator.generate, (args.max_number,)),
        "countdown": (countdown.generate, (args.max_number, args.operands)),
        SHOWN: (digits.generate, (args.train_size,)),
        "multiplication": (multiplication.generate, (args.max_number,)),
    }.get(args.task, (games.generate, (args.task,)))
    rows = generate(args.train_size + args.test_size, args.seed, *special)
    splits = {"train.jsonl": rows[: args.train_size], "test.jsonl": rows[args.train_size :]}
    if args.careless_share:
        demonstrated = DEMONSTRATIONS[args.task](splits["train.jsonl"], args.careless_share, args.seed)
        splits["demonstrations.jsonl"] = demonstrated
    if args.task == SHOWN:
        splits["unseen.jsonl"] = digits.unseen(splits["test.jsonl"])
    folder = Path(args.output_dir)
    with atomic_files(folder) as stage:
        for name, part in splits.items():
            lines = (json.dumps({"task": _task(args.task).name} | row) for row in part)
            (stage / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if args.tokenizer_vocab_size is not None:
            tokenizer = train_tokenizer(_texts(args.task, splits), args.tokenizer_vocab_size, images=args.task == SHOWN)
            tokenizer.save(stage)
    for name, part in splits.items():
        print(f"{folder / name}: {len(part)} {args.task} problems")
    if args.tokenizer_vocab_size is not None:
        print(f"{folder}: tokenizer with {tokenizer.size} ids")


def _task(name: str) -> Task:
    return get_task("game" if name in games.GAMES else name)


def _texts(name: str, splits: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """List the texts that the tokenizer learns from."""
    task = _task(name)
    demonstrated = splits.get("demonstrations.jsonl", [])
    problems = [task.parse(row) for row in splits["train.jsonl"]]
    texts = [text for problem in problems for text in (problem.question, task.instruction, problem.answer)]
    return texts + [text for row in demonstrated for text in calculator.written_turns(row)]


def _validate(args: argparse.Namespace) -> None:
    for flag in ("train_size", "test_size"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: should be 1 or more.")
    for flag in ("two_step_share", "careless_share"):
        if not 0 <= getattr(args, flag) <= 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: is a fraction, so it should be from 0 to 1.")
    if args.careless_share and args.task not in DEMONSTRATIONS:
        tasks = " or ".join(DEMONSTRATIONS)
        raise UserError(f"--careless_share goes with --task {tasks}, and the task is {args.task}; remove it.")
    if set(args.operations) - set(arithmetic.OPERATIONS):
        raise UserError(f"--operations {args.operations}: should be some of + - *.")
    if min(args.operands) < 2 or max(args.operands) > 6:
        raise UserError(f"--operands {' '.join(map(str, args.operands))}: each should be from 2 to 6.")
