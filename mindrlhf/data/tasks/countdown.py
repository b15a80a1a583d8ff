"""Countdown (TinyZero's task): reach a target, using each given number once."""

import json
import random
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from mindrlhf.data.tasks.task import Task, TaskRow, distinct, optional_text
from mindrlhf.files.json import is_whole


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse `nums` (or `numbers`), `target`, and an optional worked `answer`.

    Ground truth: compact JSON, `{"target":24,"numbers":[3,8]}`.
    """
    key = "numbers" if "numbers" in row and "nums" not in row else "nums"
    numbers = row.get(key)
    target = row.get("target")
    if not isinstance(numbers, list) or len(numbers) < 2 or not all(is_whole(number) for number in numbers):
        raise ValueError(f"key {key!r} should be a list of two or more integers, and is {numbers!r}")
    if not is_whole(target):
        raise ValueError(f"key 'target' should be an integer, and is {target!r}")
    listed = ", ".join(map(str, numbers))
    return TaskRow(
        question=f"Make {target} from the numbers {listed}. Use each number exactly once, with +, -, * and /.",
        answer=optional_text(row, "answer"),
        ground_truth=json.dumps({"target": target, "numbers": numbers}, separators=(",", ":")),
    )


def generate(count: int, seed: int, max_number: int = 99, operands: Sequence[int] = (3, 4)) -> list[dict[str, Any]]:
    """Generate `count` different solvable problems as source rows `{nums, target, answer}`.

    max_number: largest number given, and largest target. operands: possible counts of numbers. Numbers in another order
    are the same problem. Rows are shuffled, because problems with few numbers run out first and any part should be like
    the rest. UserError when there are too few.
    """
    rng = random.Random(seed)

    def draw() -> tuple[tuple[tuple[int, ...], int], dict[str, Any]] | None:
        numbers = [rng.randint(1, max_number) for _ in range(rng.choice(operands))]
        target, expression = _combine(numbers, rng)
        if not 1 <= target <= max_number:
            return None
        answer = f"<answer>{expression}</answer>"
        return (tuple(sorted(numbers)), target), {"nums": numbers, "target": target, "answer": answer}

    rows = distinct(count, draw, "countdown")
    rng.shuffle(rows)
    return rows


def demonstrations(rows: list[dict[str, Any]], careless_share: float, seed: int) -> list[dict[str, Any]]:
    """Answer the same problems carelessly: a part of them by adding all the numbers."""
    rng = random.Random(f"careless {seed}")
    totals = [{**row, "answer": f"<answer>{'+'.join(map(str, row['nums']))}</answer>"} for row in rows]
    return [total if rng.random() < careless_share else row for row, total in zip(rows, totals, strict=True)]


def _combine(numbers: Sequence[int], rng: random.Random) -> tuple[int, str]:
    """Join the numbers by random operations without fractions; returns (value, expression)."""
    terms = [(number, str(number)) for number in numbers]
    while len(terms) > 1:
        rng.shuffle(terms)
        pair = terms.pop(), terms.pop()
        (left, left_text), (right, right_text) = sorted(pair, key=itemgetter(0), reverse=True)
        results = {"+": left + right, "-": left - right, "*": left * right}
        if right and left % right == 0:
            results["/"] = left // right
        operation = rng.choice(list(results))
        terms.append((results[operation], f"({left_text}{operation}{right_text})"))
    value, text = terms[0]
    return value, text[1:-1]


_FINISH = "Write the finished expression between <answer> and </answer>, for example <answer>(8-2)*4</answer>."
COUNTDOWN = Task(name="countdown", instruction=_FINISH, reward="countdown", parse=parse)
