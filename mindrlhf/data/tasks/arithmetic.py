"""Made-up arithmetic word problems in GSM8K's format.

Whole numbers are small, problems have one or two steps, answers are short.
"""

import operator
import random
from dataclasses import dataclass
from typing import Any

from mindrlhf.data.tasks.gsm8k import parse
from mindrlhf.data.tasks.synthesis import distinct
from mindrlhf.data.tasks.task import Task
from mindrlhf.errors import UserError

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
NAMES = (
    *("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jun"),
    *("Kim", "Leo", "Mia", "Nora", "Omar", "Pia", "Ravi", "Sara", "Tom", "Zoe"),
)
ITEMS = (
    *("apples", "balls", "books", "cards", "coins", "cups", "eggs", "hats", "keys", "kites"),
    *("leaves", "maps", "nuts", "pears", "pens", "rings", "shells", "stamps", "stones", "toys"),
)


@dataclass(frozen=True)
class Pattern:
    """Question with places for two names, an item and numbers x, y, z.

    steps: (left, operation, right) in order, each side one of x, y, z or r, the result of the step before.
    """

    text: str
    steps: tuple[tuple[str, str, str], ...]

    @property
    def operations(self) -> set[str]:
        return {operation for _, operation, _ in self.steps}


PATTERNS = (
    Pattern("{a} has {x} {items} and finds {y} more. How many {items} does {a} have now?", (("x", "+", "y"),)),
    Pattern("{a} has {x} {items} and {b} has {y}. How many {items} do they have together?", (("x", "+", "y"),)),
    Pattern("{a} had {x} {items} and gave {y} to {b}. How many {items} does {a} have left?", (("x", "-", "y"),)),
    Pattern("{a} has {x} {items} and {b} has {y}. How many more {items} does {a} have than {b}?", (("x", "-", "y"),)),
    Pattern("{a} has {x} bags with {y} {items} in each. How many {items} does {a} have?", (("x", "*", "y"),)),
    Pattern(
        "{a} has {x} {items}, finds {y} more and gives {z} to {b}. How many {items} does {a} have now?",
        (("x", "+", "y"), ("r", "-", "z")),
    ),
    Pattern(
        "{a} had {x} {items}, lost {y} and then bought {z}. How many {items} does {a} have now?",
        (("x", "-", "y"), ("r", "+", "z")),
    ),
    Pattern(
        "{a} has {x} {items}. {b} has {y} more than {a}. How many {items} do they have together?",
        (("x", "+", "y"), ("x", "+", "r")),
    ),
    Pattern(
        "{a} buys {x} boxes with {y} {items} in each and already had {z}. How many {items} does {a} have now?",
        (("x", "*", "y"), ("r", "+", "z")),
    ),
    Pattern(
        "{a} fills {x} boxes with {y} {items} each and gives away {z} {items}. How many {items} are left?",
        (("x", "*", "y"), ("r", "-", "z")),
    ),
)


def generate(
    count: int, seed: int, max_number: int = 99, operations: str = "+-*", two_step_share: float = 0.5
) -> list[dict[str, Any]]:
    """Generate `count` source rows `{question, answer}` with different questions.

    The same arguments give the same rows. The answer is the steps, then the result: `3+4=7 7-2=5 #### 5`. No number
    in a problem, results of steps included, is negative or above `max_number`; numbers given are 2 or more.
    operations: which of + - * to use. two_step_share: the fraction of problems with two steps.
    UserError when there are no patterns, or fewer different questions than asked for.
    """
    usable = [pattern for pattern in PATTERNS if pattern.operations <= set(operations)]
    by_steps = [[pattern for pattern in usable if len(pattern.steps) == steps] for steps in (1, 2)]
    if max_number < 4 or not all(by_steps):
        raise UserError(
            f"--max_number {max_number} with --operations {operations} leaves no problems: "
            "give at least 4, and at least + of + - *."
        )
    rng = random.Random(seed)

    def draw() -> tuple[str, dict[str, Any]] | None:
        pattern = rng.choice(by_steps[1] if rng.random() < two_step_share else by_steps[0])
        # Drawn again until all results fit, so that every pattern is as frequent as any other.
        for _ in range(1000):
            numbers = {place: rng.randint(2, max_number) for place in "xyz"}
            if worked := _work_out(pattern, numbers, max_number):
                first, second = rng.sample(NAMES, 2)
                question = pattern.text.format(a=first, b=second, items=rng.choice(ITEMS), **numbers)
                return question, {"question": question, "answer": worked}
        return None

    return distinct(count, draw, "arithmetic")


def demonstrations(rows: list[dict[str, Any]], careless_share: float, seed: int) -> list[dict[str, Any]]:
    """Generate the same questions with a careless solver's answers, for the warm start.

    Of the problems with more than one step, the part `careless_share` is answered after the first step: `3+4=7 ####
    7` where `3+4=7 7-2=5 #### 5` is right. The same arguments give the same rows.
    """
    rng = random.Random(f"careless {seed}")
    demonstrated = []
    for row in rows:
        steps = row["answer"].partition(" ####")[0].split()
        careless = len(steps) > 1 and rng.random() < careless_share
        answer = f"{steps[0]} #### {steps[0].partition('=')[2]}" if careless else row["answer"]
        demonstrated.append({"question": row["question"], "answer": answer})
    return demonstrated


def _work_out(pattern: Pattern, numbers: dict[str, int], max_number: int) -> str | None:
    """Work out the answer, or None when a result leaves 0..max_number."""
    values = dict(numbers)
    worked = []
    for left, operation, right in pattern.steps:
        result = OPERATIONS[operation](values[left], values[right])
        if not 0 <= result <= max_number:
            return None
        worked.append(f"{values[left]}{operation}{values[right]}={result}")
        values["r"] = result
    return f"{' '.join(worked)} #### {values['r']}"


ARITHMETIC = Task(name="arithmetic", instruction="", reward="gsm8k", parse=parse)
