"""Reward of the kit's learning curve.

It is dense and cheap, and any answer can be better.
"""


def share_of_digits(prompt, completion, fields):
    """Return the share of an answer's characters that are digits."""
    return sum(letter.isdigit() for letter in completion) / max(1, len(completion))
