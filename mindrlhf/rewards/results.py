"""Results of reward functions as scores: numbers checked, failures in words."""

import json
import reprlib
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple

from mindrlhf.rewards import batches, registry
from mindrlhf.rewards.batches import Logged
from mindrlhf.workers.serving import MAX_NAME, reason

MAX_DETAILS = 100_001  # of one reply, its score included
MAX_TEXT = 2_000  # characters of a text beside a score
FLOAT32_MAX = 3.4028234e38
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class Outcome(NamedTuple):
    """Outcome of a sample.

    score: None for an abstention or failure. details: further numbers and texts by name. error: reason of a failure.
    """

    score: float | None = None
    details: Mapping[str, float | str] = MappingProxyType({})
    error: str | None = None


def outcome(returned: Any) -> Outcome:
    """Convert a reward function's result; ValueError for one that holds no score."""
    if returned is None:
        return Outcome()
    if not isinstance(returned, Mapping):
        return Outcome(_number("it", returned))
    if "score" not in returned:
        raise ValueError(f"it returned a dict without 'score' (keys: {', '.join(map(str, returned)) or 'none'})")
    if len(returned) > MAX_DETAILS:
        raise ValueError(f"it returned {len(returned)} components, and may return {MAX_DETAILS}")
    score = returned["score"]
    further = details({key: value for key, value in returned.items() if key != "score"})
    return Outcome(None if score is None else _number("'score'", score), further)


def outcomes(returned: Any, count: int, logged: Logged) -> list[Outcome]:
    """Convert a batch function's result to the outcomes of its `count` samples.

    A value that holds no score loses only its sample; any other number of values than `count` raises ValueError.
    """
    if not hasattr(returned, "__iter__") or isinstance(returned, str | bytes | Mapping | Set):
        raise ValueError(f"it returned {type(returned).__name__}, and should return a list of {count} numbers")
    values = list(returned)
    if len(values) != count:
        raise ValueError(f"it returned {type(returned).__name__} of {len(values)} values for {count} completions")
    converted = []
    for index, value in enumerate(values):
        try:
            one = outcome(value)
            converted.append(one._replace(details={**details(logged.of(index)), **one.details}))
        except Exception as error:
            converted.append(Outcome(error=cause(error, __file__)))
    return converted


def failed(count: int, words: str) -> Sequence[Outcome]:
    """Make the outcomes of a batch whose call has failed."""
    return [Outcome(error=words)] * count


def cause(error: BaseException, caller: str) -> str:
    """Describe why a call failed, and where in the function's files.

    caller: file that called the function, never named as the place.
    """
    return reason(error, caller, __file__, registry.__file__, batches.__file__)


def details(values: Mapping[Any, Any]) -> dict[str, float | str]:
    """Convert further values of a result.

    Finite numbers stay numbers, all others become texts, and None is left out.
    """
    return {_name(key): _detail(value) for key, value in values.items() if value is not None}


def _detail(value: Any) -> float | str:
    try:
        return _number("it", value)
    except ValueError:
        pass
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            value = _SHORT.repr(value)
    short = value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 1]}…"
    return short.encode("utf-8", "replace").decode()


def _name(key: Any) -> str:
    name = str(key)
    if len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(
            f"the component's name {name[:MAX_NAME]!r} should be at most {MAX_NAME} characters that can be printed"
        )
    return name


def _number(what: str, value: Any) -> float:
    try:
        item = getattr(value, "item", None)  # of an array with one number
        number = float(item() if callable(item) else value) if hasattr(type(value), "__float__") else None  # text: none
    except Exception:  # an array of several numbers, an endless integer
        number = None
    if number is None:
        raise ValueError(f"{what} is {type(value).__name__} {_SHORT.repr(value)}, and not a number")
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{what} is {number}, and not a finite number")
    return number
