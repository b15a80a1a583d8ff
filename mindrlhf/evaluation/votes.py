"""Votes for maj@k: groups of answers that the task's reward calls equal."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mindrlhf.rewards import answers, gsm8k, knights_and_knaves
from mindrlhf.rewards.verl import shipped, source_of

COMPARISONS = 100  # of a problem by math-verify; each may take half a second


def votes(reward: str, fields: Mapping[str, Any], completions: Sequence[tuple[str, str]]) -> list[str | None]:
    """Give each answer the text of its group, None without an answer.

    reward: name of the task's reward. fields: the problem's. completions: (prompt, completion) of each answer. The
    rewards for numbers group by the number, strict ones by the text of the number, `math` by its equality, knights and
    knaves by the roles; other functions group by the number that is stated, or else by the stated text without spaces.
    The groups do not depend on the order of the answers.
    """
    reward = shipped(source_of(fields)) or reward if reward == "verl" else reward
    if reward == "math":
        return _mathematical(completions)
    return [_BY_TEXT.get(reward, _number)(prompt, completion) for prompt, completion in completions]


def _number(prompt: str, completion: str) -> str | None:
    answer, number = gsm8k.answered(prompt, completion)
    return _spaceless(answer) if number is None else str(number)


def _text(prompt: str, completion: str) -> str | None:
    return _spaceless(answers.stated(prompt, completion))


def _roles(prompt: str, completion: str) -> str | None:
    roles = knights_and_knaves.said(prompt, completion)
    return "; ".join(f"{name}: {' and '.join(sorted(roles[name]))}" for name in sorted(roles)) or None


def _strict(prompt: str, completion: str) -> str | None:
    return gsm8k.strict_answer(completion)


def _spaceless(answer: str | None) -> str | None:
    return re.sub(r"\s", "", answer or "") or None


_BY_TEXT: Mapping[str, Callable[[str, str], str | None]] = {
    "gsm8k_strict": _strict,
    "openai/gsm8k": _strict,
    "countdown": _text,
    "knights_and_knaves": _roles,
}


def _mathematical(completions: Sequence[tuple[str, str]]) -> list[str | None]:
    """Group texts by the equality of `math`.

    From the shortest on, each text joins the first group whose shortest text it equals. After COMPARISONS of other
    texts than numbers, a text is a group of its own.
    """
    from mindrlhf.rewards import exact, math  # takes half a second

    texts = [math.answer_of(prompt, completion) for prompt, completion in completions]
    values = {text: exact.read(text) for text in texts if text is not None}
    left = COMPARISONS
    groups: dict[str, str] = {}

    def equal(text: str, first: str) -> bool:
        nonlocal left
        if not (values[text] and values[first]):
            left -= 1
            return left >= 0 and math.same(first, text)
        return math.same(first, text)

    for text in sorted(values, key=lambda text: (len(text), text)):
        heads = dict.fromkeys(groups.values())
        groups[text] = next((first for first in heads if equal(text, first)), text)
    return [None if text is None else groups[text] for text in texts]
