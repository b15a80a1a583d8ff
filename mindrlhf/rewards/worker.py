"""Main program of a reward process: reads calls, calls functions, writes replies.

Lines of JSON. First comes {"functions": [[name, args], ...], "timeout_s": seconds}, answered by {"greeting": [bool,
...]}, if each needs a ground truth, or {"error": sentence}. Then each [[number, function, prompt, completion, fields],
...] is answered by one reply for each call, in order and at once: [number, score or null, {component: number}, seconds,
error or null]. Imports only the standard library and the functions' modules, so that starting takes milliseconds.
"""

import json
import reprlib
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mindrlhf.rewards.registry import RewardFunction, resolve
from mindrlhf.workers.serving import MAX_NAME, greet, open_pipes, reason, serve

MAX_COMPONENTS = 100_001  # of one reply, its score among them
FLOAT32_MAX = 3.4028234e38
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def main() -> None:
    """Serve until the input ends."""
    requests, replies = open_pipes()
    setup = json.loads(requests.readline())

    def prepare() -> tuple[list[RewardFunction], list[bool]]:
        functions = [resolve(name, args) for name, args in setup["functions"]]
        return functions, [function.needs_ground_truth for function in functions]

    functions = greet(replies, prepare)
    serve(requests, replies, setup["timeout_s"], lambda function, *sample: _call(functions[function], *sample))


def _call(function: RewardFunction, prompt: str, completion: str, fields: dict[str, str]) -> list[Any]:
    start = time.perf_counter()
    score, components, failure = None, {}, None
    try:
        score, components = outcome(function(prompt, completion, MappingProxyType(fields)))
    except BaseException as error:  # sys.exit too costs no more than its sample
        failure = reason(error, __file__)
    return [score, components, time.perf_counter() - start, failure]


def outcome(returned: Any) -> tuple[float | None, dict[str, float]]:
    """Convert a reward function's result to (score, components); None is an abstention.

    ValueError for none of the forms in the room's docstring.
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
