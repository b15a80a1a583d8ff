"""Main program of a reward process: reads calls, calls functions, writes replies.

Lines of JSON. First comes {"functions": [[name, args], ...], "timeout_s": seconds}, answered by {"greeting": [[bool,
bool, bool], ...]}, whether each function needs a ground truth, takes a batch and takes token ids, or {"error":
sentence}. Then each [[number, function, sample], ...] is answered by one reply for each call, in order and at once:
[number, score or null, {detail: number or text}, seconds, error or null]. A sample is {"prompt": text, "completion":
text, "fields": {...}}, with prompt_ids and completion_ids if the function takes token ids. A call of a batch function
is [number, function, [sample, ...], [steps done, steps in all]], and its reply [number, [[score or null, {detail:
number or text}, error or null], ...], seconds].
Imports only the standard library and the functions' modules, so that starting takes milliseconds.
"""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.rewards.batches import Logged, Sample, Steps
from mindrlhf.rewards.registry import RewardFunction, resolve
from mindrlhf.rewards.results import Outcome, cause, failed, outcome, outcomes
from mindrlhf.workers.serving import greet, open_pipes, serve


def main() -> None:
    """Serve until the input ends."""
    requests, replies = open_pipes()
    setup = json.loads(requests.readline())

    def prepare() -> tuple[list[RewardFunction], list[tuple[bool, ...]]]:
        functions = [resolve(name, args) for name, args in setup["functions"]]
        return functions, [(one.needs_ground_truth, one.takes_batch, one.takes_ids) for one in functions]

    functions = greet(replies, prepare)

    def call(number: int, *given: Any) -> list[Any]:
        function = functions[number]
        return _call_batch(function, *given) if function.takes_batch else _call(function, *given)

    serve(requests, replies, setup["timeout_s"], call)


def _call(function: RewardFunction, sample: Mapping[str, Any]) -> list[Any]:
    start = time.perf_counter()
    try:
        found = outcome(function(**sample))
    except BaseException as error:  # even sys.exit loses only its sample
        found = Outcome(error=cause(error, __file__))
    score, details, failure = found
    return [score, dict(details), time.perf_counter() - start, failure]


def _call_batch(function: RewardFunction, samples: Sequence[Mapping[str, Any]], steps: Sequence[int]) -> list[Any]:
    start = time.perf_counter()
    logged = Logged(len(samples))
    found: Sequence[Outcome]
    try:
        every = [Sample(**sample) for sample in samples]
        found = outcomes(function.of_batch(every, Steps._make(steps), logged), len(samples), logged)
    except BaseException as error:
        found = failed(len(samples), cause(error, __file__))
    return [[(score, dict(details), error) for score, details, error in found], time.perf_counter() - start]
