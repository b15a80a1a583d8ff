"""Figures of single tokens in a step's last update."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from mindrlhf.training.updater import Update
from mindrlhf.types import Experience, put_back

CLIPPED = ("clip_fraction", "dual_clip_fraction")  # metrics of an objective: 1 where a clip acts


def widest(experiences: Sequence[Experience], most: int) -> set[int]:
    """Choose the groups with the widest spread of rewards, at most `most`, by index."""
    spreads = [np.std(known) if (known := e.rewards[~np.isnan(e.rewards)]).size else 0.0 for e in experiences]
    return set(sorted(range(len(experiences)), key=lambda index: -spreads[index])[:most])


def with_token_figures(
    experiences: Sequence[Experience], updates: Sequence[Update], parts: int, most: int
) -> list[Experience]:
    """Add figures to the groups with the widest spread of rewards.

    updates: all updates of the step, none while a critic warms up. A pass over the experiences consists of `parts`
    updates, each with every `parts`-th group. Without an update the advantage is the only figure.
    """
    chosen = widest(experiences, most)
    last = updates[len(updates) - parts :]
    return [
        replace(e, token_figures=_figures(e, last[index % parts] if last else None, index // parts))
        if index in chosen
        else e
        for index, e in enumerate(experiences)
    ]


def of_widest(experiences: Sequence[Experience], most: int) -> list[Experience]:
    """Keep the figures of the widest groups of all ranks, and drop the others."""
    with_figures = [index for index, e in enumerate(experiences) if e.token_figures]
    kept = {with_figures[place] for place in widest([experiences[index] for index in with_figures], most)}
    return [e if index in kept else replace(e, token_figures=None) for index, e in enumerate(experiences)]


def _figures(e: Experience, update: Update | None, place: int) -> tuple[Mapping[str, np.ndarray], ...]:
    """Compute one group's figures; place: index of the group in its update."""
    figures = {"advantage": e.rows("advantages")}
    if update:
        metrics = {name: groups[place] for name, groups in update.metrics.items()}
        sampled = {"entropy": metrics["entropy"]}
        if "policy_kl" in metrics:  # a loss of the user may have other metrics
            sampled["ratio"] = [np.exp(-row) for row in metrics["policy_kl"]]
        if clips := [metrics[name] for name in CLIPPED if name in metrics]:
            sampled["clipped"] = [np.maximum.reduce(rows) for rows in zip(*clips, strict=True)]
        figures |= {name: put_back(rows, e.sampled) for name, rows in sampled.items()}
    return tuple({name: rows[index] for name, rows in figures.items()} for index in range(len(e.group.rollouts)))
