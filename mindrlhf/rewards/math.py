"""Mathematical answers: numbers compared exactly, others by math-verify within limits."""

import logging
import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

import math_verify
from sympy import Basic, nan, oo, zoo

from mindrlhf.rewards import answers, exact, numbers
from mindrlhf.rewards.work_limit import MAX_TEXT, TooMuchWorkError, check_size, check_text, work_limit

# math-verify's time limits need the alarm signal, and the reward runner has its own. It would warn that they are off.
for _part in ("parser", "grader"):
    logging.getLogger(f"math_verify.{_part}").setLevel(logging.ERROR)
math_verify.parse(r"\boxed{x^2}", parsing_timeout=None)  # preparations of the first parse count for no answer

DIGITS = 500  # of comparisons: decimals are not rounded
_MIXED = re.compile(
    r"(?<![\w^_.}/\\])(?!(?<=,)[0-9]{3}\b)([0-9]+)(?:\s+([0-9]+)\s*/\s*([0-9]+)|\s*\\frac\{([0-9]+)\}\{([0-9]+)\})(?![0-9]|[.][0-9])"
)
_SAID = re.compile(
    r"answer\s*(?:is|:|=)+\s*(.*?)(?=[;\n]|,(?![0-9])|\.(?:\s|$)|\s(?:because|since|as|so|which)\b|$)", re.I | re.S
)
_GROUPED = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9])")


def math(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    r"""Reward 1 for an answer equal to the ground truth, else 0.

    The ground truth is LaTeX or plain text. The stated answer (`answers.stated`) counts, else the answer that
    math-verify finds in the last 1,000 characters after the thinking. Equality is that of `same`.
    """
    answer = answer_of(prompt, completion)
    return float(answer is not None and same(str(fields["ground_truth"]), answer))


def answer_of(prompt: str, completion: str) -> str | None:
    """Find the answer that is compared, as text."""
    answer = answers.stated(prompt, completion)
    return _found(answers.after_thinking(prompt, completion)[-MAX_TEXT:]) if answer is None else answer


def same(gold: str, answer: str) -> bool:
    r"""Test two answers for equality.

    Two values (`exact.read`) are equal if exact arithmetic finds them equal, so that nothing is rounded: 0.33 is not
    1/3. math-verify decides on all else, without rounding; an answer that takes more work than `work_limit` allows is
    wrong. A text that it cannot read, and a number that only people can (`exact.doubtful`), equals the same text only.
    """
    if gold.strip() == answer.strip():
        return True
    first, second = exact.read(gold), exact.read(answer)
    if first and second:
        return first.equals(second)
    if exact.doubtful(gold) or exact.doubtful(answer):
        if first or second or "_" in gold + answer:
            return False
    elif "".join(gold.split()) == "".join(answer.split()):
        return True
    with suppress(TooMuchWorkError), work_limit():
        expected, found = (_parse(rf"\boxed{{{_spelled(text)}}}") for text in (gold, answer))
        if expected and (_infinite(expected) or not _infinite(found)):  # math-verify finds \infty^{\infty} equal to 18
            digits = {"float_rounding": DIGITS, "numeric_precision": DIGITS}
            return math_verify.verify(expected, found, timeout_seconds=None, **digits)
    return False


def _found(text: str) -> str | None:
    """Find an answer that is not stated in one of the forms: its text."""
    said = deque(_SAID.finditer(text), maxlen=1)
    if said and (exact.read(said[0][1]) or exact.doubtful(said[0][1])):
        return said[0][1]
    with suppress(TooMuchWorkError), work_limit():
        found = _parse(text)
        if found and isinstance(found[-1], str):
            return _whole(found[-1], text)
    return None


def _whole(found: str, text: str) -> str | None:
    """Replace a number that was cut out of a longer one.

    For the `3` of `x = 3\\frac12` it is the last number of the text.
    """
    value = exact.read(found)
    if value is None or value.number in numbers.every(text):
        return f"{found}%" if re.search(rf"{re.escape(found)}\s*\\?%", text) else found
    last = numbers.last(text)
    return None if last is None else str(last)


def _spelled(text: str) -> str:
    """Spell mixed numbers and thousands in a way that math-verify reads right."""
    plain = text.replace(r"\,", " ").replace("{,}", ",")
    return _MIXED.sub(_fraction, _GROUPED.sub(lambda found: found[0].replace(" ", ""), plain))


def _fraction(found: re.Match[str]) -> str:
    whole = int(found[1])
    part = int(found[2] or found[4])
    parts = int(found[3] or found[5])
    return rf"\frac{{{whole * parts + part}}}{{{parts}}}"


def _parse(text: str) -> list:
    check_text(text)
    found = math_verify.parse(text, parsing_timeout=None)
    check_size(found)
    return found


def _infinite(found: list) -> bool:
    return any(one.has(oo, -oo, zoo, nan) for one in found if isinstance(one, Basic))
