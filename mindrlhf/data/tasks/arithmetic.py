"""Made-up arithmetic word problems in GSM8K's format, of one or two steps."""

import operator
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mindrlhf.data.tasks.gsm8k import parse
from mindrlhf.data.tasks.task import Task, distinct
from mindrlhf.errors import UserError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
TEXTS = yaml.safe_load(Path(__file__).with_name("arithmetic.yaml").read_text(encoding="utf-8"))


def generate(
    count: int, seed: int, max_number: int = 99, operations: str = "+-*", two_step_share: float = 0.5
) -> list[dict[str, Any]]:
    """Generate `count` source rows `{question, answer}` with different questions.

    The answer is the steps, then the result: `3+4=7 7-2=5 #### 5`. Numbers given are from 2 to `max_number`, results
    from 0. operations: which of + - * to use. two_step_share: fraction of two-step problems. UserError if there are too
    few.
    """
    usable = [each for each in TEXTS["problems"] if {step.split()[1] for step in each["steps"]} <= set(operations)]
    by_steps = [[each for each in usable if len(each["steps"]) == steps] for steps in (1, 2)]
    if max_number < 4 or not all(by_steps):
        given = f"--max_number {max_number} with --operations {operations}"
        raise UserError(f"{given} leaves no problems: give at least 4, and at least + of + - *.")
    rng = random.Random(seed)

    def draw() -> tuple[str, dict[str, Any]] | None:
        problem = rng.choice(by_steps[1] if rng.random() < two_step_share else by_steps[0])
        # Drawn again until all results fit, so that every problem is as frequent as any other.
        for _ in range(1000):
            numbers = {place: rng.randint(2, max_number) for place in "xyz"}
            if worked := _work_out(problem["steps"], numbers, max_number):
                question = phrase(problem["question"], numbers, rng)
                return question, {"question": question, "answer": worked}
        return None

    return distinct(count, draw, "arithmetic")


def demonstrations(rows: list[dict[str, Any]], careless_share: float, seed: int) -> list[dict[str, Any]]:
    """Answer a part of the two-step questions after one step: `3+4=7 #### 7`."""
    rng = random.Random(f"careless {seed}")
    demonstrated = []
    for row in rows:
        first, *others = row["answer"].partition(" ####")[0].split()
        careless = others and rng.random() < careless_share
        demonstrated.append(row | {"answer": f"{first} #### {first.partition('=')[2]}"} if careless else row)
    return demonstrated


def phrase(question: str, numbers: Mapping[str, int], rng: random.Random) -> str:
    """Write a question with these numbers, and with drawn names and items."""
    first, second = rng.sample(TEXTS["names"], 2)
    return question.format(a=first, b=second, items=rng.choice(TEXTS["items"]), **numbers)


def _work_out(steps: list[str], numbers: dict[str, int], max_number: int) -> str | None:
    """Work out the answer, or None when a result leaves 0..max_number."""
    values = dict(numbers)
    worked = []
    for step in steps:
        left, operation, right = step.split()
        result = OPERATIONS[operation](values[left], values[right])
        if not 0 <= result <= max_number:
            return None
        worked.append(f"{values[left]}{operation}{values[right]}={result}")
        values["r"] = result
    return f"{' '.join(worked)} #### {values['r']}"


ARITHMETIC = Task(name="arithmetic", instruction="", reward="gsm8k", parse=parse)
