r"""GSM8K's reward (Cobbe et al. 2021): 1 for the right final number, else 0."""

from collections.abc import Mapping
from fractions import Fraction

from mindrlhf.rewards import answers, numbers


def answered(completion: str) -> tuple[str | None, Fraction | None]:
    """Find the stated answer (`answers.stated`) and its number, else the last number."""
    answer = answers.stated(completion)
    if answer is None:
        return None, numbers.last(answers.after_thinking(completion))
    return answer, numbers.stated(answer)


def gsm8k(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward the number in the stated answer, else the last number."""
    return float(answered(completion)[1] == _ground_truth(fields))


def gsm8k_strict(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward only the form `#### N`, the number alone on its line."""
    answer = answers.marked(answers.after_thinking(completion))
    return float(answer is not None and numbers.parse(answer) == _ground_truth(fields))


def _ground_truth(fields: Mapping[str, str]) -> Fraction:
    number = numbers.parse(fields["ground_truth"])
    if number is None:
        raise ValueError(f"the ground truth {fields['ground_truth'][:80]!r} is not a number")
    return number
