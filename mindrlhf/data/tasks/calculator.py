"""Made-up sums for a model with a calculator, and conversations that demonstrate its use."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.data.tasks.arithmetic import OPERATIONS
from mindrlhf.data.tasks.gsm8k import MARK, parse
from mindrlhf.data.tasks.task import Task, distinct
from mindrlhf.data.tool_formats import Hermes, ToolCall, read_call
from mindrlhf.errors import UserError

LEAST = 32  # number in a problem, so that the product of two has four digits or more
QUESTIONS = ("What is {sum}?", "Compute {sum}.", "How much is {sum}?")
GARBLED_SHARE = 0.1  # of the careless demonstrations
TOOL = "calculator"


def generate(count: int, seed: int, max_number: int = 99, operations: str = "+-*") -> list[dict[str, Any]]:
    """Generate `count` source rows `{question, answer}` with different sums.

    Numbers are from 32 to max_number, results from 0. operations: which of + - * to use. UserError for too few
    problems.
    """
    if max_number <= LEAST:
        raise UserError(f"--max_number {max_number}: sums for a calculator need numbers above {LEAST}.")
    rng = random.Random(seed)

    def draw() -> tuple[str, dict[str, Any]] | None:
        left, right = (rng.randint(LEAST, max_number) for _ in range(2))
        operation = rng.choice(operations)
        result = OPERATIONS[operation](left, right)
        expression = f"{left} {operation} {right}"
        question = rng.choice(QUESTIONS).format(sum=expression)
        return None if result < 0 else (expression, {"question": question, "answer": f"{MARK} {result}"})

    return distinct(count, draw, TOOL)


def demonstrations(rows: list[dict[str, Any]], careless_share: float, seed: int) -> list[dict[str, Any]]:
    """Answer the questions in conversations, a part of them carelessly.

    The careful ones call the calculator and repeat its answer. The careless ones write a wrong number, at once or after
    a call that cannot be read.
    """
    rng = random.Random(f"careless {seed}")
    return [{"messages": _conversation(row, careless_share, rng)} for row in rows]


def written_turns(row: Mapping[str, Any]) -> Iterator[str]:
    """Write out the turns of a demonstration, for a tokenizer to learn from."""
    for message in row.get("messages", ()):
        calls = [Hermes().render(read_call(call)) for call in message.get("tool_calls", ())]
        yield "\n".join([message["role"], message["content"], *calls])


def _conversation(row: dict[str, Any], careless_share: float, rng: random.Random) -> list[dict[str, Any]]:
    question, result = {"role": "user", "content": row["question"]}, row["answer"].removeprefix(f"{MARK} ")
    expression = "".join(letter for letter in row["question"] if letter in "0123456789 +-*").strip()
    call = ToolCall(TOOL, {"expression": expression})
    if rng.random() >= careless_share:
        used = {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        asked = {"role": "assistant", "content": "", "tool_calls": [used]}
        return [question, asked, {"role": "tool", "content": result}, _answer(result)]
    guess = _answer(_guess(result, rng))
    if rng.random() >= GARBLED_SHARE:
        return [question, guess]
    garbled = Hermes().render(call).replace("}}", "}")
    (read,) = Hermes().parse(garbled)
    return [question, {"role": "assistant", "content": garbled}, {"role": "tool", "content": read.error}, guess]


def _answer(number: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"{MARK} {number}"}


def _guess(result: str, rng: random.Random) -> str:
    """Draw another number with as many digits."""
    low, high = 10 ** (len(result) - 1), 10 ** len(result) - 1
    return str(next(number for number in iter(lambda: rng.randint(low, high), None) if str(number) != result))


CALCULATOR = Task(name=TOOL, instruction="", reward="gsm8k", parse=parse)
