"""Mathematical answers, compared by math-verify (sympy) within limits on the work."""

from collections.abc import Mapping
from contextlib import suppress

import math_verify
from sympy import Basic, nan, oo, zoo

from mindrlhf.rewards import answers, numbers
from mindrlhf.rewards.work_limit import MAX_TEXT, TooMuchWorkError, check_size, check_text, work_limit

math_verify.parse(r"\boxed{x^2}", parsing_timeout=None)  # preparations of the first parse count for no answer


def math(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    r"""Reward 1 for an answer equal to the ground truth, else 0.

    The ground truth is LaTeX or plain text. The stated answer (`answers.stated`) counts, else the answer that
    math-verify finds in the last 1,000 characters after the thinking. Equal texts and numbers (`numbers.equal`) are
    equal; for all others math-verify decides: `50\%` is also 0.5 there, and decimals are rounded to six places. An
    answer that takes more work than `work_limit` allows is wrong.
    """
    gold = fields["ground_truth"]
    answer = answers.stated(completion)
    if answer is not None and (answer.strip() == gold.strip() or numbers.equal(answer, gold)):
        return 1.0
    expected: list = []
    with suppress(TooMuchWorkError), work_limit():
        expected = _parse(_boxed(gold))
    if not expected:
        raise ValueError(f"math-verify cannot read the ground truth {gold[:80]!r}")
    text = answers.after_thinking(completion)[-MAX_TEXT:] if answer is None else _boxed(answer)
    with suppress(TooMuchWorkError), work_limit():
        found = _parse(text)
        if _infinite(expected) or not _infinite(found):  # math-verify finds \infty^{\infty} equal to 18
            # No time limits here: math-verify's need the alarm signal, and the reward runner has a limit.
            return float(math_verify.verify(expected, found, timeout_seconds=None))
    return 0.0


def _parse(text: str) -> list:
    check_text(text)
    found = math_verify.parse(text, parsing_timeout=None)
    check_size(found)
    return found


def _infinite(found: list) -> bool:
    return any(one.has(oo, -oo, zoo, nan) for one in found if isinstance(one, Basic))


def _boxed(answer: str) -> str:
    return rf"\boxed{{{answer}}}"
