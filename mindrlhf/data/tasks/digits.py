"""Made-up questions about images of handwritten digits, for a model that sees.

The digits are scikit-learn's: 1,797 of them, of 8 x 8 pixels. A fifth is held out: images of the held-out problems have
no digit that training shows.
"""

import base64
import io
import random
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image

from mindrlhf.data.tasks.gsm8k import MARK, parse
from mindrlhf.data.tasks.task import Task, distinct
from mindrlhf.errors import UserError

CELL, SIDE = 16, 14  # pixels of a digit's square in an image, and of the digit in it
WHITE = 16  # of scikit-learn's digits
HELD_OUT = 5  # every fifth digit
COUNTED, ASKED = 4, 7  # digits of an image in which one is counted, and the one
QUESTIONS = {
    "sum": "What is the sum of the two digits?",
    "larger": "Which digit is the larger one?",
    "count": "How many sevens are there?",
}

Digits = dict[int, list[np.ndarray]]


def generate(count: int, seed: int, trained: int) -> list[dict[str, Any]]:
    """Generate `count` source rows `{question, answer, images}`.

    Those behind the first `trained` are held out. A third asks for a sum, a third for the larger of two digits, and a
    third how many of four digits are sevens. The answer is the digits line by line, and the result:
    `3 9 #### 12`. UserError without scikit-learn.
    """
    rng = random.Random(seed)
    every = _written_digits()
    rng.shuffle(every)
    parts = (every[len(every) // HELD_OUT :], trained), (every[: len(every) // HELD_OUT], count - trained)
    return [row for digits, rows in parts for row in _problems(_by_value(digits), rows, rng)]


def demonstrations(rows: list[dict[str, Any]], careless_share: float, seed: int) -> list[dict[str, Any]]:
    """Answer a part of the questions with the smallest digit: `9 3 #### 3`."""
    rng = random.Random(f"careless {seed}")
    demonstrated = []
    for row in rows:
        answer = row["answer"]
        if rng.random() < careless_share:
            digits = answer.partition(MARK)[0]
            answer = f"{digits}{MARK} {min(digits.split())}"
        messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
        demonstrated.append({"messages": messages, "images": row["images"]})
    return demonstrated


def unseen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the same problems with black images, which only guessing answers."""
    black = np.zeros((CELL, CELL), np.uint8)
    return [row | {"images": [_written(_arranged([black] * _shown(row)))]} for row in rows]


def _shown(row: dict[str, Any]) -> int:
    """Count the digits of a problem."""
    return len(row["answer"].partition(MARK)[0].split())


def _problems(digits: Digits, count: int, rng: random.Random) -> list[dict[str, Any]]:
    def draw() -> tuple[str, dict[str, Any]]:
        kind = rng.choice(list(QUESTIONS))
        values = [rng.randrange(10) for _ in range(2)] if kind != "count" else _counted(rng)
        result = {"sum": sum(values), "larger": max(values), "count": values.count(ASKED)}[kind]
        image = _written(_arranged([_cell(rng.choice(digits[value]), rng) for value in values]))
        answer = f"{' '.join(map(str, values))} {MARK} {result}"
        question = f"<image>{QUESTIONS[kind]}"
        return question + image, {"question": question, "answer": answer, "images": [image]}

    return distinct(count, draw, "digits")


def _arranged(cells: Sequence[np.ndarray]) -> np.ndarray:
    """Place digits in lines of two."""
    return np.vstack([np.hstack(cells[first : first + 2]) for first in range(0, len(cells), 2)])


def _counted(rng: random.Random) -> list[int]:
    """Draw digits of which any number is the one that is asked for."""
    others = [value for value in range(10) if value != ASKED]
    there = rng.randint(0, COUNTED - 1)
    values = [ASKED] * there + rng.choices(others, k=COUNTED - there)
    rng.shuffle(values)
    return values


def _cell(digit: np.ndarray, rng: random.Random) -> np.ndarray:
    """Place a digit in its square, uint8[CELL, CELL], anywhere and more or less bright."""
    bright = rng.uniform(0.7, 1.0) * 255 / WHITE
    drawn = Image.fromarray((digit * bright).astype(np.uint8)).resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    cell = np.zeros((CELL, CELL), np.uint8)
    top, left = (rng.randint(0, CELL - SIDE) for _ in range(2))
    cell[top : top + SIDE, left : left + SIDE] = np.asarray(drawn)
    return cell


def _written(pixels: np.ndarray) -> str:
    """Write an image as a data URI, which browsers show."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _by_value(digits: Sequence[tuple[int, np.ndarray]]) -> Digits:
    return {value: [pixels for own, pixels in digits if own == value] for value in range(10)}


def _written_digits() -> list[tuple[int, np.ndarray]]:
    """Load (value, float64[8, 8] from 0 to `WHITE`) of each digit."""
    try:
        load_digits = import_module("sklearn.datasets").load_digits
    except ImportError:
        raise UserError("--task digits needs scikit-learn's digits; pip install scikit-learn.") from None
    digits = load_digits()
    return list(zip(digits.target.tolist(), digits.images, strict=True))


DIGITS = Task(name="digits", instruction="", reward="gsm8k", parse=parse)
