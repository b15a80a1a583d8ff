"""Distributions of rewards and lengths over the answers of a run's steps."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from mindrlhf.report.answers import StepAnswers

MOST_POINTS = 300  # of a distribution's curves; longer runs are shown as several steps together
MOST_BINS = 10  # of rewards; if there are fewer different rewards, each has a bin
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def distributions(steps: Sequence[StepAnswers]) -> dict[str, Any]:
    """Compute shares of reward bins and quantiles of lengths by step.

    Steps are combined into at most MOST_POINTS points, each at its last step. Rewards that are not finite are left out.
    Returns {} without answers.
    """
    if not any(one.lengths.size for one in steps):
        return {}
    width = -(-len(steps) // MOST_POINTS)
    parts = [steps[start : start + width] for start in range(0, len(steps), width)]
    rewards = [np.concatenate([one.rewards for one in part]) for part in parts]
    rewards = [row[np.isfinite(row)] for row in rewards]
    lengths = [np.concatenate([one.lengths for one in part]) for part in parts]
    quantiles = np.array([np.quantile(row, QUANTILES) if row.size else [np.nan] * len(QUANTILES) for row in lengths])
    return {
        "steps": [part[-1].step for part in parts],
        "rewards": _shares(rewards),
        "lengths": [(f"{share:.0%}", quantiles[:, at].tolist()) for at, share in enumerate(QUANTILES)],
    }


def _shares(parts: Sequence[np.ndarray]) -> list[tuple[str, list[float]]]:
    """Compute each bin's shares, from the lowest rewards to the highest."""
    every = np.unique(np.concatenate(parts))
    if not every.size:
        return []
    if every.size <= MOST_BINS:
        counts = [(row[:, None] == every).sum(0) for row in parts]
        names = [f"{value:.3g}" for value in every]
    else:
        edges = np.linspace(every[0], every[-1], MOST_BINS + 1)
        counts = [np.histogram(row, edges)[0] for row in parts]
        names = [f"{low:.3g} to {high:.3g}" for low, high in pairwise(edges)]
    shares = np.array([count / max(1, row.size) for count, row in zip(counts, parts, strict=True)]).round(4)
    return [(name, shares[:, at].tolist()) for at, name in enumerate(names)]
