"""Multiplication of whole numbers, worked out by the second factor's digits."""

import random
from collections.abc import Mapping
from typing import Any

from mindrlhf.data.tasks.gsm8k import MARK
from mindrlhf.data.tasks.task import Task, TaskRow, distinct, optional_text
from mindrlhf.errors import UserError
from mindrlhf.files.json import is_whole


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse `factors`, two whole numbers, and an optional worked `answer`."""
    factors = row.get("factors")
    if not isinstance(factors, list) or len(factors) != 2 or not all(is_whole(factor) for factor in factors):
        raise ValueError(f"key 'factors' should be a list of two integers, and is {factors!r}")
    return TaskRow(
        question=f"What is {factors[0]} * {factors[1]}?",
        answer=optional_text(row, "answer"),
        ground_truth=str(factors[0] * factors[1]),
    )


def generate(count: int, seed: int, max_number: int = 99) -> list[dict[str, Any]]:
    """Generate `count` different products as source rows `{factors, answer}`.

    Factors are from 2 to max_number; their order makes no difference. UserError when there are too few.
    """
    if max_number < 2:
        raise UserError(f"--max_number {max_number}: multiplication needs factors of 2 or more.")
    rng = random.Random(seed)

    def draw() -> tuple[tuple[int, ...], dict[str, Any]]:
        factors = [rng.randint(2, max_number) for _ in range(2)]
        return tuple(sorted(factors)), {"factors": factors, "answer": _worked(*factors)}

    return distinct(count, draw, "multiplication")


def _worked(first: int, second: int) -> str:
    """Work out an answer: `12*34=12*30+12*4=360+48=408 #### 408`, or `12*30=360 #### 360`."""
    digits = str(second)
    parts = [int(digit) * 10 ** (len(digits) - place - 1) for place, digit in enumerate(digits) if digit != "0"]
    steps = [f"{first}*{second}"]
    if len(parts) > 1:
        steps += ["+".join(f"{first}*{part}" for part in parts), "+".join(str(first * part) for part in parts)]
    return f"{'='.join(steps)}={first * second} {MARK} {first * second}"


_FINISH = f'Work it out, and finish with "{MARK} " and the product.'
MULTIPLICATION = Task(name="multiplication", instruction=_FINISH, reward="gsm8k", parse=parse)
