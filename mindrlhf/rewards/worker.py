"""Main program of a reward process: reads calls, calls functions, writes replies.

Lines of JSON. First comes {"functions": [[name, args], ...], "timeout_s": seconds}, answered by {"needs_ground_truth":
[bool, ...]} or {"error": sentence}. Then each [[number, function, prompt, completion, fields], ...] is answered by one
reply for each call, in order and at once: [number, score or null, {component: number}, seconds, error or null].
A child process that a function forks never gets to the pipes, and ends where it returns from the function. Imports only
the standard library and the functions' modules, so that starting takes milliseconds.
"""

import json
import os
import reprlib
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.printable import printable
from mindrlhf.rewards.registry import RewardFunction, resolve

MAX_REASON = 500  # characters of an error's text that are passed on
MAX_NAME = 200  # characters of a component's name
MAX_COMPONENTS = 100_001  # of one reply, its score among them
FLOAT32_MAX = 3.4028234e38
EXIT_S = 5.0
_ENCODER = json.JSONEncoder(separators=(",", ":"))
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def main() -> None:
    """Serve until the input ends."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the training blocks what asks it to stop; functions do not
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # what functions print is dropped, at the cost of nothing
        os.dup2(null, descriptor)
    for pipe in (requests.fileno(), replies.fileno()):
        os.register_at_fork(after_in_child=partial(os.closerange, pipe, pipe + 1))
    sys.argv[1:] = []
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # a function's hunger for memory is to end this process, not the training
    setup = json.loads(requests.readline())
    own = os.getpid()
    try:
        functions = [resolve(name, args) for name, args in setup["functions"]]
        greeting = {"needs_ground_truth": [function.needs_ground_truth for function in functions]}
    except UserError as error:
        greeting = {"error": printable(str(error))}
    _end_child(own)
    _send(replies, greeting)
    # The other side ends a call that takes too long; should it have died itself, the kernel does, by the alarm signal.
    limit = 2 * setup["timeout_s"] + EXIT_S
    for line in requests:
        for number, function, *sample in json.loads(line):
            signal.setitimer(signal.ITIMER_REAL, limit)
            reply = _call(functions[function], *sample)
            _end_child(own)
            _send(replies, [number, *reply])
        signal.setitimer(signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_REAL, EXIT_S)  # for threads that a function left behind


def _end_child(own: int) -> None:
    """End this process if a function forked it from process `own`."""
    if os.getpid() != own:
        os._exit(0)


def _send(replies: Any, message: Any) -> None:
    line = memoryview(_ENCODER.encode(message).encode() + b"\n")
    while line:
        line = line[replies.write(line) :]


def _call(function: RewardFunction, prompt: str, completion: str, fields: dict[str, str]) -> list[Any]:
    start = time.perf_counter()
    score, components, reason = None, {}, None
    try:
        score, components = outcome(function(prompt, completion, MappingProxyType(fields)))
    except BaseException as error:  # sys.exit too costs no more than its sample
        reason = _reason(error)
    return [score, components, time.perf_counter() - start, reason]


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


def _reason(error: BaseException) -> str:
    """Format `ValueError: message (file.py, line 3)`, the innermost line outside of this file."""
    places = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [f" ({os.path.basename(file)}, line {line})" for file, line in places if file != __file__]
    try:
        message = str(error)
    except BaseException as second:
        message = f"(its text fails with {type(second).__name__})"
    return printable(f"{type(error).__name__[:MAX_NAME]}: {message[:MAX_REASON]}{places[-1] if places else ''}")
