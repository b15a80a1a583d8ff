"""Comparison of two runs of one job by the acceptance rules for ports.

The mean absolute error over shared steps is at most 4% of mean |A| for rewards and 2% for the loss. Runs of fine-tuning
have a loss alone. Two ratios have no limit: of mean `perf/throughput` over the first 4 steps, and of the total time of
the shared steps. Beside a reward, a loss that is 0 by construction (one update a batch, advantages that sum to 0, no KL
term) is rounding in both runs and is not judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.metrics.console import REWARD
from mindrlhf.metrics.timer import STEP

REWARD_LIMIT, LOSS_LIMIT = 0.04, 0.02
LOSSES = ("actor/loss", "actor/pg_loss", "train/loss")  # the first that a step has is compared
ROUNDING = 1e-6  # float32 sums of advantages of about 1 that cancel are below it
THROUGHPUT = "perf/throughput"
THROUGHPUT_STEPS = 4
SECONDS = f"timing_s/{STEP}"

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Agreement:
    """Difference of one metric over `steps` shared steps.

    absolute: mean |B - A|. relative: absolute / mean |A|, inf if only A is 0 throughout. zero: both are.
    rounding: both are rounding around a 0 by construction, so the difference is not judged.
    """

    metric: str
    steps: int
    absolute: float
    relative: float
    limit: float
    zero: bool
    rounding: bool = False

    @property
    def holds(self) -> bool:
        """True when the difference is not judged or within the limit; NaN is not."""
        return self.rounding or self.relative <= self.limit

    @property
    def informs(self) -> bool:
        """True when the numbers could have differed."""
        return not self.zero and not self.rounding

    def __str__(self) -> str:
        if self.rounding:
            size = f"below {ROUNDING:g} in both over {self.steps} steps ({self.absolute:.3g} apart)"
            return f"{self.metric}: {size}, which is rounding of a loss that is 0 by construction: not judged"
        said = "agrees" if self.holds else "DIFFERS"
        return (
            f"{self.metric}: mean absolute error {self.relative:.2%} of mean |A| over {self.steps} steps "
            f"(limit {self.limit:.0%}; {self.absolute:.3g} absolute): "
            f"{'0 throughout in both, which says nothing' if self.zero else said}"
        )


@dataclass(frozen=True)
class Comparison:
    """Result; reward: None for fine-tuning.

    throughput: B's mean / A's mean over the first steps, or None. seconds: total time of the shared steps in A and in
    B, or None.
    """

    reward: Agreement | None
    loss: Agreement
    throughput: float | None
    seconds: tuple[float, float] | None

    @property
    def agreements(self) -> list[Agreement]:
        """List the comparisons; the first one has to be informative."""
        return [one for one in (self.reward, self.loss) if one]

    @property
    def holds(self) -> bool:
        """True when all metrics are within their limits and the first one is informative."""
        return all(one.holds for one in self.agreements) and self.agreements[0].informs

    def __str__(self) -> str:
        lines = [str(one) for one in self.agreements]
        if self.throughput is not None:
            over = f"mean over the first {THROUGHPUT_STEPS} steps"
            lines.append(f"{THROUGHPUT}: B is {self.throughput:.3f} of A ({over}; no limit)")
        if self.seconds is not None:
            ours, theirs = self.seconds
            took = f"B takes {theirs / ours:.3f} of A ({theirs:.2f} s and {ours:.2f} s; no limit)"
            lines.append(f"total time of the shared steps: {took}")
        if not all(one.holds for one in self.agreements):
            lines.append("the runs DIFFER")
        elif not self.holds:
            lines.append(
                f"it stays open whether the runs agree: compare steps with a {'reward' if self.reward else 'loss'}"
            )
        else:
            lines.append("the runs agree")
        return "\n".join(lines)


def compare(a: Rows, b: Rows) -> Comparison:
    """Compare run B with run A; UserError if they share no step."""
    rewarded = any(REWARD in row for rows in (a, b) for row in rows)
    loss = next((name for name in LOSSES if all(any(name in row for row in rows) for rows in (a, b))), LOSSES[0])
    reward = _agreement(REWARD, a, b, REWARD_LIMIT) if rewarded else None
    first, second = ([row[THROUGHPUT] for row in rows if THROUGHPUT in row][:THROUGHPUT_STEPS] for rows in (a, b))
    throughput = fmean(second) / fmean(first) if second and any(first) else None
    return Comparison(reward, _agreement(loss, a, b, LOSS_LIMIT, beside=reward), throughput, _seconds(a, b))


def _shared(metric: str, a: Rows, b: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Collect the values of the steps at which both runs have a metric."""
    first, second = ({row["step"]: row[metric] for row in rows if metric in row} for rows in (a, b))
    steps = sorted(first.keys() & second.keys())
    ours, theirs = (np.array([column[step] for step in steps], np.float64) for column in (first, second))
    return ours, theirs


def _seconds(a: Rows, b: Rows) -> tuple[float, float] | None:
    ours, theirs = (float(column.sum()) for column in _shared(SECONDS, a, b))
    return (ours, theirs) if ours > 0 else None


def _agreement(metric: str, a: Rows, b: Rows, limit: float, beside: Agreement | None = None) -> Agreement:
    """Compare one metric. beside: the rewards, without which no loss is 0 by construction."""
    ours, theirs = _shared(metric, a, b)
    if not len(ours):
        raise UserError(f"the two runs share no step that has {metric}; give two runs of the same job.")
    absolute = float(np.abs(theirs - ours).mean())
    size = float(np.abs(ours).mean())
    relative = absolute / size if size else (0.0 if absolute == 0 else float("inf"))
    rounding = beside is not None and bool(np.abs([ours, theirs]).max() < ROUNDING)
    return Agreement(metric, len(ours), absolute, relative, limit, zero=absolute == size == 0, rounding=rounding)
