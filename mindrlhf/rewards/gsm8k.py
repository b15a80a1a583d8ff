r"""GSM8K's rewards (Cobbe et al. 2021): 1 for the right final number, else 0."""

import re
from collections.abc import Mapping
from fractions import Fraction

from mindrlhf.rewards import answers, numbers

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_STRICT_END = 300  # characters


def answered(prompt: str, completion: str) -> tuple[str | None, Fraction | None]:
    """Find the stated answer (`answers.stated`) and its number, else the last number."""
    answer = answers.stated(prompt, completion)
    if answer is None:
        return None, numbers.last(answers.after_thinking(prompt, completion))
    return answer, numbers.stated(answer)


def gsm8k(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward the number in the stated answer, else the last number."""
    return float(answered(prompt, completion)[1] == _ground_truth(fields))


def gsm8k_strict(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward as verl does for `openai/gsm8k` (versions 0.5 to 0.9).

    Of the last 300 characters, thoughts included, the last `#### ` with digits, points and commas after it counts; it
    has to be the text of the ground truth, commas aside.
    """
    return float(strict_answer(completion) == answers.truth_of(fields))


def strict_answer(completion: str) -> str | None:
    """Find the text that `gsm8k_strict` compares, without commas."""
    found = _STRICT.findall(completion[-_STRICT_END:])
    return found[-1].replace(",", "") if found else None


def _ground_truth(fields: Mapping[str, str]) -> Fraction:
    truth = answers.truth_of(fields)
    number = numbers.parse(truth)
    if number is None:
        raise ValueError(f"the ground truth {truth[:80]!r} is not a number")
    return number
