"""What runs in a reward process: reads calls from its input, calls the functions, writes one reply for each.

Lines of JSON. First comes {"functions": [[name, args], ...], "timeout_s": seconds}, and is answered by
{"needs_ground_truth": [bool, ...]}, or by {"error": sentence}. Then each {"samples": [[prompt, completion, fields],
...], "calls": [[function, sample], ...]} is answered by one reply for each call, in order and at once, so that the
other side knows which call is under way: [score or null, {component: number}, seconds, error or null].

Imports nothing beyond the standard library but what the functions need, so that starting takes milliseconds.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, SupportsFloat

from mindrlhf.errors import UserError
from mindrlhf.rewards.registry import RewardFunction, resolve

MAX_REASON = 500  # characters of an error's text that are passed on
FLOAT32_MAX = 3.4028234e38
EXIT_S = 5.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def main() -> None:
    """Serve until the input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what functions print is dropped, at the cost of nothing
        os.dup2(null, descriptor)
    sys.argv[1:] = []
    setup = json.loads(requests.readline())
    try:
        functions = [resolve(name, args) for name, args in setup["functions"]]
    except UserError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"needs_ground_truth": [function.needs_ground_truth for function in functions]})
    # The other side ends a call that takes too long; should it have died itself, the kernel does, by the alarm signal.
    limit = 2 * setup["timeout_s"] + EXIT_S
    for line in requests:
        batch = json.loads(line)
        for function, sample in batch["calls"]:
            signal.setitimer(signal.ITIMER_REAL, limit)
            _send(replies, _call(functions[function], *batch["samples"][sample]))
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_REAL, EXIT_S)  # for threads that a function left behind


def _send(replies: Any, message: Any) -> None:
    replies.write(_ENCODER.encode(message).encode() + b"\n")
    replies.flush()


def _call(function: RewardFunction, prompt: str, completion: str, fields: dict[str, str]) -> list[Any]:
    start = time.perf_counter()
    score, components, reason = None, {}, None
    try:
        score, components = outcome(function(prompt, completion, MappingProxyType(fields)))
    except BaseException as error:  # sys.exit too costs no more than its sample
        reason = _reason(error)
    return [score, components, time.perf_counter() - start, reason]


def outcome(returned: Any) -> tuple[float | None, dict[str, float]]:
    """What a reward function returned, as (score or None for an abstention, components).

    Raises ValueError when it is none of the forms of the contract (see the room's docstring).
    """
    if returned is None:
        return None, {}
    if not isinstance(returned, Mapping):
        return _number(returned, "it"), {}
    if "score" not in returned:
        raise ValueError(f"it returned a dict without 'score' (keys: {', '.join(map(str, returned)) or 'none'})")
    score = returned["score"]
    components = {str(key): _number(value, f"{key!r}") for key, value in returned.items() if key != "score"}
    return None if score is None else _number(score, "'score'"), components


def _number(value: Any, what: str) -> float:
    if not isinstance(value, SupportsFloat):  # text is not
        raise ValueError(f"{what} is {type(value).__name__} {value!r:.80}, and not a number")
    number = float(value)
    if not abs(number) <= FLOAT32_MAX:
        raise ValueError(f"{what} is {number}, and not a finite number")
    return number


def _reason(error: BaseException) -> str:
    """`ValueError: message (file.py, line 3)`, the line being the innermost one outside of this file."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [(os.path.basename(file), line) for file, line in places if file != __file__]
    where = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    try:
        message = str(error)
    except BaseException as second:
        message = f"(its text fails with {type(second).__name__})"
    return f"{type(error).__name__}: {message[:MAX_REASON]}{where}"
