"""Results of reward functions as scores: numbers checked, failures in words."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.workers.serving import MAX_NAME, reason

MAX_COMPONENTS = 100_001  # of one reply, its score included
FLOAT32_MAX = 3.4028234e38
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80

Outcome = tuple[float | None, dict[str, float], str | None]
"""Score of a sample, None for an abstention or failure; its components; the reason of a failure."""


def outcome(returned: Any) -> tuple[float | None, dict[str, float]]:
    """Convert a reward function's result to (score, components); None is an abstention.

    ValueError for a result in none of the forms in the docstring of `mindrlhf.rewards`.
    """
    if returned is None:
        return None, {}
    if not isinstance(returned, Mapping):
        return _number("it", returned), {}
    if "score" not in returned:
        raise ValueError(f"it returned a dict without 'score' (keys: {', '.join(map(str, returned)) or 'none'})")
    if len(returned) > MAX_COMPONENTS:
        raise ValueError(f"it returned {len(returned)} components, and may return {MAX_COMPONENTS}")
    components = {_name(key): _number(repr(key), value) for key, value in returned.items() if key != "score"}
    score = returned["score"]
    return None if score is None else _number("'score'", score), components


def outcomes(returned: Any, count: int) -> list[Outcome]:
    """Convert a batch function's result to the outcomes of its `count` samples.

    A value in none of the forms loses only its sample; any other number of values than `count` raises ValueError.
    """
    found = f"it returned {type(returned).__name__}"
    if not hasattr(returned, "__iter__") or isinstance(returned, str | bytes | Mapping):
        raise ValueError(f"{found}, and should return a list of {count} numbers")
    values = list(returned)
    if len(values) != count:
        raise ValueError(f"{found} of {len(values)} values for {count} completions")
    converted: list[Outcome] = []
    for value in values:
        try:
            converted.append((*outcome(value), None))
        except ValueError as error:
            converted.append((None, {}, reason(error, __file__)))
    return converted


def failed(count: int, words: str) -> Sequence[Outcome]:
    """Make the outcomes of a batch whose call has failed."""
    return [(None, {}, words)] * count


def _name(key: Any) -> str:
    name = str(key)
    if len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(
            f"the component's name {name[:MAX_NAME]!r} should be at most {MAX_NAME} characters that can be printed"
        )
    return name


def _number(what: str, value: Any) -> float:
    if not hasattr(type(value), "__float__"):  # text has none
        raise ValueError(f"{what} is {type(value).__name__} {_SHORT.repr(value)}, and not a number")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{what} is {number}, and not a finite number")
    return number
