"""Reward of the recipe geo3k.yaml."""

import re
from collections.abc import Mapping

from mindrlhf.rewards.math import math

FOR_THE_FORM = 0.1  # of 1
FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def geo3k(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward 0.9 for the right answer, and 0.1 for thoughts between the tags with a box behind them.

    The weights and the form are those of verl 0.7 for `hiyouga/geometry3k`.
    """
    form = FOR_THE_FORM * bool(FORM.fullmatch(completion))
    return form + (1 - FOR_THE_FORM) * math(prompt, completion, fields)
