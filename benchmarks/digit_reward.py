"""Reward of the benchmark: dense, cheap, and different between responses."""

import re

ANSWER = re.compile(r"#### (-?[0-9.,]+)")


def digits(prompt, completion, fields):
    """Return the share of characters that are digits, plus 1 if the last number after #### is the answer."""
    found = ANSWER.findall(completion[-300:])
    right = bool(found) and found[-1] == fields["ground_truth"]
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion)) + right
