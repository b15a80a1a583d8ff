"""Reward functions of the calling program, called in its own process.

They have access to the program's objects and share its memory and time: a function that never returns blocks the
training. A call that raises loses only its samples.
"""

import inspect
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from mindrlhf.rewards.batches import Logged, Sample, Steps, run_all
from mindrlhf.rewards.process import Reply
from mindrlhf.rewards.registry import RewardFunction
from mindrlhf.rewards.results import Outcome, cause, failed, outcome, outcomes

CALLER = (Exception, SystemExit)  # errors of a function; an interrupt is for the caller


def score_in_process(
    functions: Mapping[int, RewardFunction], samples: Sequence[Sample], steps: Steps
) -> dict[int, list[Reply]]:
    """Call functions, by their place, on samples; awaitable results run together."""
    if not samples:
        return {place: [] for place in functions}
    replies: dict[int, list[Reply]] = {}
    waiting: dict[int, tuple[Awaitable[Any], Logged]] = {}
    for place, function in functions.items():
        start = time.perf_counter()
        if function.takes_batch:
            logged = Logged(len(samples))
            found = _begun(function, samples, steps, logged)
            if inspect.isawaitable(found):
                waiting[place] = found, logged
                continue
            replies[place] = _replies(_checked(found, len(samples), logged), time.perf_counter() - start)
        else:
            replies[place] = _replies(_each(function, samples), time.perf_counter() - start)
    start = time.perf_counter()
    results_of = run_all(found for found, _ in waiting.values()) if waiting else ()
    for (place, (_, logged)), returned in zip(waiting.items(), results_of, strict=True):
        replies[place] = _replies(_checked(returned, len(samples), logged), time.perf_counter() - start)
    return replies


def _begun(function: RewardFunction, samples: Sequence[Sample], steps: Steps, logged: Logged) -> Any:
    """Return what a batch function has returned or raised."""
    try:
        return function.begin_batch(samples, steps, logged)
    except CALLER as error:
        return error


def _checked(returned: Any, count: int, logged: Logged) -> Sequence[Outcome]:
    """Convert what a batch function has returned or raised to outcomes."""
    try:
        if isinstance(returned, BaseException):
            raise returned
        return outcomes(returned, count, logged)
    except CALLER as error:
        return failed(count, cause(error, __file__))


def _each(function: RewardFunction, samples: Sequence[Sample]) -> list[Outcome]:
    found: list[Outcome] = []
    for sample in samples:
        try:
            found.append(outcome(function(*sample)))
        except CALLER as error:
            found.append(Outcome(error=cause(error, __file__)))
    return found


def _replies(found: Sequence[Outcome], seconds: float) -> list[Reply]:
    return [Reply(score, details, seconds / len(found), error) for score, details, error in found]
