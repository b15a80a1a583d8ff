"""Comparison of two runs of one job by the acceptance rules for ports.

The mean absolute error over shared steps is at most 4% of mean |A| for rewards and 2% for the loss; the ratio of mean
`perf/throughput` over the first 4 steps has no limit. A loss near 0 by construction (one update a batch, no KL term) is
mostly rounding: its absolute error is shown too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from mindrlhf.errors import UserError
from mindrlhf.metrics.console import REWARD

REWARD_LIMIT, LOSS_LIMIT = 0.04, 0.02
LOSSES = ("actor/loss", "actor/pg_loss", "train/loss")  # the first that a step has is compared
THROUGHPUT, THROUGHPUT_STEPS = "perf/throughput", 4

Rows = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class Agreement:
    """Difference of one metric over `steps` shared steps.

    absolute: mean |B - A|. relative: absolute / mean |A|, inf if only A is 0 throughout. zero: both are.
    """

    metric: str
    steps: int
    absolute: float
    relative: float
    limit: float
    zero: bool

    @property
    def holds(self) -> bool:
        """True when the difference is within the limit; NaN is not."""
        return self.relative <= self.limit

    def __str__(self) -> str:
        said = "agrees" if self.holds else "DIFFERS"
        return (
            f"{self.metric}: mean absolute error {self.relative:.2%} of mean |A| over {self.steps} steps "
            f"(limit {self.limit:.0%}; {self.absolute:.3g} absolute): "
            f"{'0 throughout in both, which says nothing' if self.zero else said}"
        )


@dataclass(frozen=True)
class Comparison:
    """Result; throughput: B's mean / A's mean over the first steps, or None."""

    reward: Agreement
    loss: Agreement
    throughput: float | None

    @property
    def holds(self) -> bool:
        """True when both metrics are within their limits and the reward is informative."""
        return self.reward.holds and self.loss.holds and not self.reward.zero

    def __str__(self) -> str:
        lines = [str(self.reward), str(self.loss)]
        if self.throughput is not None:
            over = f"mean over the first {THROUGHPUT_STEPS} steps"
            lines.append(f"{THROUGHPUT}: B is {self.throughput:.3f} of A ({over}; no limit)")
        if not (self.reward.holds and self.loss.holds):
            lines.append("the runs DIFFER")
        elif self.reward.zero:
            lines.append("it stays open whether the runs agree: compare steps with a reward")
        else:
            lines.append("the runs agree")
        return "\n".join(lines)


def compare(a: Rows, b: Rows) -> Comparison:
    """Compare run B with run A; UserError if they share no step."""
    loss = next((name for name in LOSSES if all(any(name in row for row in rows) for rows in (a, b))), LOSSES[0])
    first, second = ([row[THROUGHPUT] for row in rows if THROUGHPUT in row][:THROUGHPUT_STEPS] for rows in (a, b))
    throughput = fmean(second) / fmean(first) if second and any(first) else None
    return Comparison(_agreement(REWARD, a, b, REWARD_LIMIT), _agreement(loss, a, b, LOSS_LIMIT), throughput)


def _agreement(metric: str, a: Rows, b: Rows, limit: float) -> Agreement:
    first, second = ({row["step"]: row[metric] for row in rows if metric in row} for rows in (a, b))
    steps = sorted(first.keys() & second.keys())
    if not steps:
        raise UserError(f"the two runs share no step that has {metric}; give two runs of the same job.")
    ours, theirs = (np.array([column[step] for step in steps], np.float64) for column in (first, second))
    absolute, size = float(np.abs(theirs - ours).mean()), float(np.abs(ours).mean())
    relative = absolute / size if size else (0.0 if absolute == 0 else float("inf"))
    return Agreement(metric, len(steps), absolute, relative, limit, zero=absolute == size == 0)
