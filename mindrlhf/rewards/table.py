"""Result of scoring: rewards by function, their weighted sum, and failures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal, localcontext

import numpy as np

from mindrlhf.rewards.process import Reply
from mindrlhf.types import Notes

_EXACT = Context(prec=100)  # more digits than any product or sum of a few float64 numbers needs in practice


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

    totals: float64[N], the weighted sum over the functions that gave a score; NaN (unscored) where none did, or one
    failed. A function of weight 0 is not in the sum: it makes no total, and its failures cost none. The settings'
    overlong punishment is only added to a total.
    by_function: float64[N], unweighted; NaN where it abstained or failed. components: further numbers by name,
    likewise. notes: for each sample, further texts by function and name. seconds:
    float32[N], wall time inside the function (the limit, for a call that was given up). errors: sample index -> reason.
    timeouts: calls that took longer than the limit; failures: other calls without a result, abstentions excepted.
    first_failures: for each function that failed for the first time since its runner was made, its first failed sample.
    operations: of the matrix products of functions that are models.
    """

    totals: np.ndarray
    by_function: Mapping[str, np.ndarray]
    components: Mapping[str, Mapping[str, np.ndarray]]
    notes: Sequence[Notes]
    seconds: Mapping[str, np.ndarray]
    errors: Mapping[str, Mapping[int, str]]
    failures: Mapping[str, int]
    timeouts: Mapping[str, int]
    first_failures: Sequence[RewardFailure] = ()
    operations: float = 0.0


def build_table(weights: Sequence[float], replies: Mapping[str, Sequence[Reply]], scoring: int) -> RewardTable:
    """Build a table, without `first_failures`, from the replies of each function.

    scoring: only the first `scoring` functions make a total; the others are added to it.
    """
    scores = {
        name: np.array([np.nan if reply.score is None else reply.score for reply in own], np.float64)
        for name, own in replies.items()
    }
    errors = {
        name: {i: reply.error for i, reply in enumerate(own) if reply.error is not None}
        for name, own in replies.items()
    }
    timeouts = {name: sum(reply.timed_out for reply in own) for name, own in replies.items()}
    return RewardTable(
        totals=np.array([_total(weights, one, scoring) for one in zip(*replies.values(), strict=True)], np.float64),
        by_function=scores,
        components={name: _components(own) for name, own in replies.items()},
        notes=[_notes(dict(zip(replies, one, strict=True))) for one in zip(*replies.values(), strict=True)],
        seconds={name: np.array([reply.seconds for reply in own], np.float32) for name, own in replies.items()},
        errors=errors,
        failures={name: len(errors[name]) - timeouts[name] for name in replies},
        timeouts=timeouts,
    )


def weighted_sum(weights: Sequence[float], scores: Iterable[float]) -> float:
    """Sum weighted scores exactly, as decimal numbers.

    NaN scores are left out. Equal sums are then equal rewards, whichever functions gave them and in whatever order.
    """
    pairs = [(weight, score) for weight, score in zip(weights, scores, strict=True) if score == score]
    if len(pairs) == 1 and pairs[0][0] == 1.0:  # as is usual
        return float(pairs[0][1])
    with localcontext(_EXACT):
        return float(sum(Decimal(repr(weight)) * Decimal(repr(score)) for weight, score in pairs))


def _total(weights: Sequence[float], replies: Sequence[Reply], scoring: int) -> float:
    if any(weight and reply.error is not None for weight, reply in zip(weights, replies, strict=True)):
        return np.nan
    if all(not weight or reply.score is None for weight, reply in zip(weights, replies[:scoring], strict=False)):
        return np.nan
    return weighted_sum(weights, [np.nan if reply.score is None else reply.score for reply in replies])


def _components(replies: Sequence[Reply]) -> dict[str, np.ndarray]:
    numbers = [{name: value for name, value in one.details.items() if isinstance(value, float)} for one in replies]
    names = dict.fromkeys(name for one in numbers for name in one)
    return {name: np.array([one.get(name, np.nan) for one in numbers], np.float64) for name in names}


def _notes(replies: Mapping[str, Reply]) -> Notes:
    texts = {
        name: {key: value for key, value in reply.details.items() if isinstance(value, str)}
        for name, reply in replies.items()
    }
    return {name: own for name, own in texts.items() if own}
