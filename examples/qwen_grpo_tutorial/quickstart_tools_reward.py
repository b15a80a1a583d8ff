"""Reward of the second quick start."""

from collections.abc import Mapping

from mindrlhf.rewards.gsm8k import gsm8k

PRICE = 0.2  # price of a call


def thrifty(prompt: str, completion: str, fields: Mapping[str, str]) -> float:
    """Reward a right answer with 1, less 0.2 for each call, and a wrong one with 0."""
    return gsm8k(prompt, completion, fields) * (1 - PRICE * completion.count("<tool_call>"))
