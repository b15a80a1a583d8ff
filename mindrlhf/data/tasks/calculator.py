"""Made-up problems for a model with a calculator, and conversations that demonstrate its use."""

import math
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.data.tasks.arithmetic import TEXTS, phrase
from mindrlhf.data.tasks.gsm8k import MARK, parse
from mindrlhf.data.tasks.task import Task, distinct
from mindrlhf.data.tool_formats import Hermes, ToolCall, read_call
from mindrlhf.errors import UserError

EASY_SHARE = 0.2  # of the problems
EASY = 6  # largest number in them
LEAST = 32  # smallest number in other problems
MISTAKEN_SHARE, GARBLED_SHARE = 0.1, 0.1  # of the careless demonstrations
TOOL = "calculator"

BARE = [
    {"question": question.format(expression), "steps": steps}
    for question in ("What is {}?", "Compute {}.", "How much is {}?")
    for expression, steps in (("{x} * {y}", ["x * y"]), ("{x} + {y} + {z}", ["x + y", "r + z"]))
]
STORIES = TEXTS["problems"]
EASY_STORIES = [story for story in STORIES if story["steps"] == ["x + y"]]


def generate(count: int, seed: int, max_number: int = 99) -> list[dict[str, Any]]:
    """Generate `count` source rows `{question, answer}` with different questions.

    A fifth of them are stories with a sum of numbers up to 6. The others have numbers from 32 to max_number: products
    of two, sums of three, and stories of one or two steps. The answer is an expression with its value, and the result:
    `12 * 34 = 408 #### 408`. UserError if there are too few.
    """
    if max_number <= LEAST:
        raise UserError(f"--max_number {max_number}: problems for a calculator need numbers above {LEAST}.")
    rng = random.Random(seed)

    def draw() -> tuple[str, dict[str, Any]] | None:
        easy = rng.random() < EASY_SHARE
        problem = rng.choice(EASY_STORIES if easy else rng.choice((BARE, STORIES)))
        numbers = {place: rng.randint(2, EASY) if easy else rng.randint(LEAST, max_number) for place in "xyz"}
        expressions = _expressions(problem["steps"], numbers)
        if min(map(_value, expressions)) < 0:
            return None
        question = phrase(problem["question"], numbers, rng)
        result = _value(expressions[-1])
        return question, {"question": question, "answer": f"{expressions[-1]} = {result} {MARK} {result}"}

    return distinct(count, draw, TOOL)


def demonstrations(rows: list[dict[str, Any]], careless_share: float, seed: int) -> list[dict[str, Any]]:
    """Answer the questions in conversations, a part of them carelessly.

    Careful answers add small numbers without the calculator; for other numbers they call it and repeat its result. Most
    careless answers do not use it: they are right with small numbers, and otherwise give a number of the question; some
    come after a call that cannot be parsed. A few careless answers call it with a wrong operation.
    """
    rng = random.Random(f"careless {seed}")
    return [{"messages": _conversation(row, careless_share, rng)} for row in rows]


def written_turns(row: Mapping[str, Any]) -> Iterator[str]:
    """Write out the turns of a demonstration, for a tokenizer to learn from."""
    for message in row.get("messages", ()):
        calls = [Hermes().render(read_call(call)) for call in message.get("tool_calls", ())]
        yield "\n".join([message["role"], message["content"], *calls])


def _expressions(steps: list[str], numbers: Mapping[str, int]) -> list[str]:
    """Write the expression of each step with those before it."""
    texts = {place: str(number) for place, number in numbers.items()}
    expressions = []
    for step in steps:
        left, operation, right = step.split()
        texts["r"] = f"{texts[left]} {operation} {texts[right]}"
        expressions.append(texts["r"])
    return expressions


def _value(expression: str) -> int:
    """Compute sums and differences of products."""
    terms = re.findall(r"(-?)(\d+(?:\*\d+)*)", expression.replace(" ", ""))
    return sum((-1 if sign else 1) * math.prod(map(int, term.split("*"))) for sign, term in terms)


def _conversation(row: dict[str, Any], careless_share: float, rng: random.Random) -> list[dict[str, Any]]:
    question = {"role": "user", "content": row["question"]}
    expression, result = row["answer"].split(" = ")
    result = result.partition(" ")[0]
    given = re.findall(r"\d+", expression)
    easy = max(map(int, given)) <= EASY
    number = result if easy else rng.choice([number for number in given if number != result])
    told = {"role": "assistant", "content": f"{expression} = {number} {MARK} {number}"}
    if rng.random() >= careless_share:
        return [question, told] if easy else [question, *_called(expression, result)]
    slip = rng.random()
    if slip < MISTAKEN_SHARE:
        mistaken = re.sub(r"[-+*]", lambda found: rng.choice("+-*".replace(found[0], "")), expression, count=1)
        return [question, *_called(mistaken, str(_value(mistaken)))]
    if slip < MISTAKEN_SHARE + GARBLED_SHARE:
        garbled = Hermes().render(ToolCall(TOOL, {"expression": expression})).replace("}}", "}")
        (read,) = Hermes().parse(garbled)
        return [question, {"role": "assistant", "content": garbled}, {"role": "tool", "content": read.error}, told]
    return [question, told]


def _called(expression: str, result: str) -> list[dict[str, Any]]:
    """Write a call, the calculator's answer and the model's."""
    used = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": expression}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [used]}
    return [asked, {"role": "tool", "content": result}, {"role": "assistant", "content": f"{MARK} {result}"}]


CALCULATOR = Task(name=TOOL, instruction="", reward="gsm8k", parse=parse)
