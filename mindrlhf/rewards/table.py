"""Result of scoring: rewards by function, their weighted sum, and failures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.rewards.process import Reply


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
    """Rewards of N samples; the mappings are by function.

    totals: float32[N], the weighted sum over the functions that gave a score; NaN where none did. A function of weight
    0 is not in the sum and makes no total; the settings' overlong punishment is only added to one.
    by_function: float32[N], unweighted; NaN where it abstained or failed. components: by name, likewise. seconds:
    float32[N], wall time inside the function (the limit, for a call that was given up). errors: sample index -> reason.
    timeouts: calls that took longer than the limit; failures: other calls without a result, abstentions excepted.
    first_failures: for each function that failed for the first time since its runner was made, its first failed sample.
    """

    totals: np.ndarray
    by_function: Mapping[str, np.ndarray]
    components: Mapping[str, Mapping[str, np.ndarray]]
    seconds: Mapping[str, np.ndarray]
    errors: Mapping[str, Mapping[int, str]]
    failures: Mapping[str, int]
    timeouts: Mapping[str, int]
    first_failures: Sequence[RewardFailure] = ()


def build_table(weights: Sequence[float], replies: Mapping[str, Sequence[Reply]], scoring: int) -> RewardTable:
    """Build a table, without `first_failures`, from the replies of each function.

    scoring: only the first `scoring` functions make a total; the others are added to it.
    """
    scores = {
        name: np.array([np.nan if reply.score is None else reply.score for reply in own], np.float32)
        for name, own in replies.items()
    }
    columns = np.stack([column.astype(np.float64) for column in scores.values()])
    factors = np.array(weights)[:, None]
    scored = ((factors != 0) & ~np.isnan(columns))[:scoring].any(axis=0)
    errors = {
        name: {i: reply.error for i, reply in enumerate(own) if reply.error is not None}
        for name, own in replies.items()
    }
    timeouts = {name: sum(reply.timed_out for reply in own) for name, own in replies.items()}
    return RewardTable(
        totals=np.where(scored, (factors * np.nan_to_num(columns)).sum(axis=0), np.nan).astype(np.float32),
        by_function=scores,
        components={name: _components(own) for name, own in replies.items()},
        seconds={name: np.array([reply.seconds for reply in own], np.float32) for name, own in replies.items()},
        errors=errors,
        failures={name: len(errors[name]) - timeouts[name] for name in replies},
        timeouts=timeouts,
    )


def _components(replies: Sequence[Reply]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for reply in replies for name in reply.components)
    return {name: np.array([reply.components.get(name, np.nan) for reply in replies], np.float32) for name in names}
