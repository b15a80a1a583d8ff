"""Reward functions of the calling program, called in its own process.

They have access to the program's objects and share its memory and time: a function that never returns blocks the
training. A call that raises loses only its samples.
"""

import inspect
import time
from collections.abc import Awaitable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mindrlhf.rewards import batches, registry, results
from mindrlhf.rewards.batches import run_all
from mindrlhf.rewards.process import Reply, Sample
from mindrlhf.rewards.registry import RewardFunction
from mindrlhf.rewards.results import Outcome, failed, outcome, outcomes
from mindrlhf.workers.serving import reason

OWN = (__file__, results.__file__, registry.__file__, batches.__file__)  # files never named as a failure's place
CALLER = (Exception, SystemExit)  # errors of a function; an interrupt is for the caller


def score_in_process(functions: Mapping[int, RewardFunction], samples: Sequence[Sample]) -> dict[int, list[Reply]]:
    """Call functions, by their place, on samples; awaitable results run together."""
    if not samples:
        return {place: [] for place in functions}
    replies: dict[int, list[Reply]] = {}
    waiting: dict[int, Awaitable[Any]] = {}
    for place, function in functions.items():
        start = time.perf_counter()
        found = _batch(function, samples) if function.takes_batch else _each(function, samples)
        if inspect.isawaitable(found):
            waiting[place] = found
        else:
            replies[place] = _replies(found, time.perf_counter() - start)
    start = time.perf_counter()
    for place, returned in zip(waiting, run_all(waiting.values()) if waiting else (), strict=True):
        replies[place] = _replies(_checked(returned, len(samples)), time.perf_counter() - start)
    return replies


def _batch(function: RewardFunction, samples: Sequence[Sample]) -> Any:
    """Return a batch's outcomes, or the awaitable that its call has returned."""
    try:
        returned = function.begin_batch(samples)
    except CALLER as error:
        returned = error
    return returned if inspect.isawaitable(returned) else _checked(returned, len(samples))


def _checked(returned: Any, count: int) -> Sequence[Outcome]:
    """Convert what a batch function has returned or raised to outcomes."""
    try:
        if isinstance(returned, BaseException):
            raise returned
        return outcomes(returned, count)
    except CALLER as error:
        return failed(count, reason(error, *OWN))


def _each(function: RewardFunction, samples: Sequence[Sample]) -> list[Outcome]:
    found: list[Outcome] = []
    for prompt, completion, fields in samples:
        try:
            found.append((*outcome(function(prompt, completion, MappingProxyType(fields))), None))
        except CALLER as error:
            found.append((None, {}, reason(error, *OWN)))
    return found


def _replies(found: Sequence[Outcome], seconds: float) -> list[Reply]:
    share = seconds / len(found)
    return [Reply(score, components, share, error) for score, components, error in found]
