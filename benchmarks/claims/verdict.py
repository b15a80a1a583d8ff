"""Verdict on a claim: the 95% t-interval of the paired difference between two arms over seeds."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from claim import LESS, MORE, SAME, Claim

HOLDS, DOES_NOT, UNSEEN = "holds here", "does not hold here", "cannot be seen at this scale"

# 0.975 quantiles of Student's t by degrees of freedom, from 1 on.
T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
T_QUANTILES += (2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930)
MOST_SEEDS = len(T_QUANTILES) + 1


@dataclass(frozen=True)
class Difference:
    """Second arm less first arm: mean over seeds, and its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def negated(self) -> "Difference":
        return Difference(-self.mean, -self.high, -self.low)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Difference between values of the same seeds in the same order; at least 2 seeds, at most MOST_SEEDS."""
    differences = [after - before for before, after in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    half = T_QUANTILES[len(differences) - 2] * statistics.stdev(differences) / math.sqrt(len(differences))
    return Difference(mean, mean - half, mean + half)


def verdict(claim: Claim, found: Difference) -> str:
    """HOLDS, DOES_NOT or UNSEEN.

    A claim of more (or less) holds if the interval is above 0 and its mean reaches `claim.least`, and does not if the
    interval ends below `least`. A claim of no difference holds if the interval lies between -least and least, and does
    not if the interval is beside 0 and the mean reaches `least`.
    """
    if claim.says == SAME:
        if -claim.least < found.low and found.high < claim.least:
            return HOLDS
        return DOES_NOT if not found.low <= 0 <= found.high and abs(found.mean) >= claim.least else UNSEEN
    directed = {MORE: found, LESS: found.negated}[claim.says]
    if directed.low > 0 and directed.mean >= claim.least:
        return HOLDS
    return DOES_NOT if directed.high < claim.least else UNSEEN
