"""Rewards of verl by the problem's data source.

They are those of `default_compute_score` in verl 0.9, to the letter for `openai/gsm8k`. For mathematics verl compares
texts after replacements, and here values are compared (`math`); the problems of DAPO and AIME score 1 and -1 as there.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.rewards.gsm8k import gsm8k_strict

GSM8K = frozenset({"openai/gsm8k", "gsm8k"})  # the latter is this suite's task without verl's columns
DAPO = frozenset({"math_dapo", "math", "math_dapo_reasoning"})
MATH = frozenset(
    {"lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "numina_aops_forum"}
    | {"numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"}
)
_NOT_DONE = "verl's reward for the data_source {!r} is not done here; name a function in reward.functions"


def source_of(fields: Mapping[str, Any]) -> str:
    """Return a problem's data source, else its task."""
    return str(fields.get("data_source") or fields.get("task", ""))


def shipped(source: str) -> str | None:
    """Name the shipped reward that compares answers of a data source; None without one."""
    if source in GSM8K:
        return "gsm8k_strict"
    return "math" if source in MATH | DAPO or source.startswith("aime") else None


def check_sources(rows: Iterable[Mapping[str, Any]], data: str | Path) -> None:
    """Refuse rows, from `data`, with a data source that has no rule here."""
    unknown = next((source for source in map(source_of, rows) if shipped(source) is None), None)
    if unknown is not None:
        raise UserError(f"{data}: {_NOT_DONE.format(unknown[:80])}.")


def verl(prompt: str, completion: str, fields: Mapping[str, Any]) -> float | dict[str, float]:
    """Reward as verl does for the data source; ValueError for others."""
    source = source_of(fields)
    rule = shipped(source)
    if rule is None:
        raise ValueError(_NOT_DONE.format(source[:80]))
    if rule == "gsm8k_strict":
        return gsm8k_strict(prompt, completion, fields)
    from mindrlhf.rewards.math import math  # takes half a second

    right = math(prompt, completion, fields)
    return right if source in MATH else {"score": 2 * right - 1, "acc": right}
