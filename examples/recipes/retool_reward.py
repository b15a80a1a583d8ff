"""Reward of the recipe retool.yaml."""

from collections.abc import Mapping

from mindrlhf.rewards.math import math

LEAST, FOR_A_CALL, MOST = -1.0, 0.1, -0.6  # rewards of wrong answers


def retool(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward 1 for the right answer; a wrong one gets -1, and 0.1 more for each call of Python, up to -0.6.

    A `</code>` that the policy writes ends its turn, so each `</code>` is a call.
    """
    calls = completion.count("</code>")
    return 1.0 if math(prompt, completion, fields) else min(MOST, LEAST + FOR_A_CALL * calls)
