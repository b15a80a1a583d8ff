"""Main program of a reward process: reads calls, calls functions, writes replies.

Lines of JSON. First comes {"functions": [[name, args], ...], "timeout_s": seconds}, answered by {"greeting": [[bool,
bool], ...]}, whether each function needs a ground truth and takes a batch, or {"error": sentence}. Then each [[number,
function, prompt, completion, fields], ...] is answered by one reply for each call, in order and at once: [number, score
or null, {component: number}, seconds, error or null]. A call of a batch function is [number, function, [[prompt,
completion, fields], ...]], and its reply [number, [[score or null, {component: number}, error or null], ...], seconds].
Imports only the standard library and the functions' modules, so that starting takes milliseconds.
"""

import json
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from mindrlhf.rewards import registry, results
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.registry import RewardFunction, resolve
from mindrlhf.rewards.results import Outcome, failed, outcome, outcomes
from mindrlhf.workers.serving import greet, open_pipes, reason, serve

OWN = (__file__, results.__file__, registry.__file__)  # files never named as a failure's place


def main() -> None:
    """Serve until the input ends."""
    requests, replies = open_pipes()
    setup = json.loads(requests.readline())

    def prepare() -> tuple[list[RewardFunction], list[tuple[bool, bool]]]:
        functions = [resolve(name, args) for name, args in setup["functions"]]
        return functions, [(function.needs_ground_truth, function.takes_batch) for function in functions]

    functions = greet(replies, prepare)

    def call(number: int, *given: Any) -> list[Any]:
        function = functions[number]
        return _call_batch(function, *given) if function.takes_batch else _call(function, *given)

    serve(requests, replies, setup["timeout_s"], call)


def _call(function: RewardFunction, prompt: str, completion: str, fields: dict[str, str]) -> list[Any]:
    start = time.perf_counter()
    found: Outcome
    try:
        found = *outcome(function(prompt, completion, MappingProxyType(fields))), None
    except BaseException as error:  # even sys.exit loses only its sample
        found = None, {}, reason(error, *OWN)
    score, components, failure = found
    return [score, components, time.perf_counter() - start, failure]


def _call_batch(function: RewardFunction, samples: Sequence[Sample]) -> list[Any]:
    start = time.perf_counter()
    found: Sequence[Outcome]
    try:
        found = outcomes(function.of_batch(samples), len(samples))
    except BaseException as error:
        found = failed(len(samples), reason(error, *OWN))
    return [found, time.perf_counter() - start]
