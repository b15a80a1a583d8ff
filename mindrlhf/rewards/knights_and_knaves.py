"""Knights and knaves (the puzzles of Logic-RL, Xie et al. 2025)."""

import re
from collections.abc import Mapping

from mindrlhf.rewards import answers

# A match begins at the start of a word and takes the whole word: the time stays linear in the text.
_CLAIM = re.compile(
    r"(?<![\w'’-])([^\W\d_][\w'’-]*)(?![\w'’-])\W{0,3}(?:\bis\b|:|=)\W{0,3}(?:\ban?\b\W{0,3})?\b(knight|knave)\b",
    re.IGNORECASE,
)


def knights_and_knaves(prompt: str, completion: str, fields: Mapping[str, str]) -> dict[str, float]:
    """Reward 1 when every person has exactly the right role, else 0.

    The ground truth reads `(1) Zoey is a knight (2) Oliver is a knave`, as does the stated answer (`answers.stated`)
    or, without one, the text after the thinking. Component `people`: the fraction of persons with the right role.
    """
    truth = claims(fields["ground_truth"])
    if not truth:
        raise ValueError(f"the ground truth {fields['ground_truth'][:80]!r} names no knight and no knave")
    found = said(prompt, completion)
    people = sum(found.get(name) == roles for name, roles in truth.items()) / len(truth)
    return {"score": float(people == 1.0), "people": people}


def said(prompt: str, completion: str) -> dict[str, set[str]]:
    """Find the roles in an answer, by lower-case name."""
    answer = answers.stated(prompt, completion)
    return claims(answers.after_thinking(prompt, completion) if answer is None else answer)


def claims(text: str) -> dict[str, set[str]]:
    """Find the roles in `Zoey is a knight` and `Zoey: knight`, by lower-case name."""
    found: dict[str, set[str]] = {}
    for name, role in _CLAIM.findall(text):
        found.setdefault(name.lower(), set()).add(role.lower())
    return found
