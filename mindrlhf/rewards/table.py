"""Result of scoring: rewards by function, their weighted sum, and failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.rewards.process import Call, Reply


@dataclass(frozen=True)
class RewardFailure:
    """Call without a reward: function, sample index, reason, and input."""

    function: str
    sample: int
    reason: str
    prompt: str
    completion: str
    fields: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class RewardTable:
    """Rewards of N samples.

    totals: float32[N], the weighted sum over the functions that gave a score; NaN where none did. A function of
        weight 0 is only watched: it is not in the sum and does not make a total; nor does the overlong punishment that
        the settings add by themselves, which is in the sum.
    by_function: function -> float32[N], unweighted; NaN where it abstained or failed.
    components: function -> component -> float32[N]; NaN where a sample has none.
    seconds: function -> float32[N], wall time inside the function (the limit, for a call that was given up).
    errors: function -> sample index -> reason.
    failures: function -> number of calls that raised, returned no finite number, or ended their process.
    timeouts: function -> number of calls that took longer than the limit; not among `failures`.
    first_failures: for each function that failed for the first time since its runner was made, its lowest such sample.
    """

    totals: np.ndarray
    by_function: Mapping[str, np.ndarray]
    components: Mapping[str, Mapping[str, np.ndarray]]
    seconds: Mapping[str, np.ndarray]
    errors: Mapping[str, Mapping[int, str]]
    failures: Mapping[str, int]
    timeouts: Mapping[str, int]
    first_failures: tuple[RewardFailure, ...]


def build_columns(
    names: Sequence[str],
    weights: Sequence[float],
    count: int,
    replies: Mapping[Call, Reply],
    scoring: int | None = None,
) -> dict:
    """Build the fields of a RewardTable from replies, without `first_failures`.

    count: number of samples.
    scoring: only the first `scoring` functions can make a total; scores of the others are added to it. None is all.
    """
    columns: dict = {key: {} for key in ("by_function", "components", "seconds", "errors", "failures", "timeouts")}
    total, scored = np.zeros(count), np.zeros(count, bool)
    for index, (name, weight) in enumerate(zip(names, weights, strict=True)):
        own = [replies[Call(index, sample)] for sample in range(count)]
        scores = np.array([np.nan if reply.score is None else reply.score for reply in own], np.float32)
        columns["by_function"][name] = scores
        columns["components"][name] = _components(own)
        columns["seconds"][name] = np.array([reply.seconds for reply in own], np.float32)
        columns["errors"][name] = {sample: reply.error for sample, reply in enumerate(own) if reply.error is not None}
        columns["timeouts"][name] = sum(reply.timed_out for reply in own)
        columns["failures"][name] = len(columns["errors"][name]) - columns["timeouts"][name]
        if weight:
            given = ~np.isnan(scores)
            total[given] += weight * scores[given].astype(np.float64)
            if scoring is None or index < scoring:
                scored |= given
    return {"totals": np.where(scored, total, np.nan).astype(np.float32), **columns}


def _components(replies: Sequence[Reply]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for reply in replies for name in reply.components)
    return {name: np.array([reply.components.get(name, np.nan) for reply in replies], np.float32) for name in names}
