"""Charts of a report, with their metrics."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_POINTS = 1500  # of one curve; longer runs are shown as means over several steps
DIGITS = 6  # significant, of a number on the page


@dataclass(frozen=True)
class Chart:
    """Chart of some metrics, given as patterns of whole names; left out without any.

    stacked: areas on top of each other, one chart for each run; `remainder` is then the metric that they are parts of,
    together with the metric `apart`. Neither is shown.
    """

    title: str
    unit: str
    metrics: tuple[str, ...]
    stacked: bool = False
    remainder: str | None = None
    apart: str | None = None


LEARNING = (
    Chart("Reward", "mean of a step", ("critic/rewards/mean",)),
    Chart("Accuracy on held-out problems", "share right", (r"val-core/.+/acc/mean@\d+",)),
    Chart("Reward by function", "mean of a step", (r"reward/.+/mean",)),
    Chart("KL to the reference model", "nats per token", ("actor/kl_loss", "actor/reward_kl_penalty")),
    Chart("Entropy", "nats per token", ("actor/entropy",)),
    Chart("Response length", "tokens", ("response_length/mean",)),
    Chart("Clip fraction", "share of tokens", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
    Chart("Truncated responses", "share of responses", ("response_length/clip_ratio",)),
    Chart("Groups that all score the same", "share of groups", ("group/zero_std_fraction",)),
    Chart("Loss", "policy loss", ("actor/loss", "train/loss")),
    Chart("Gradient norm", "before clipping", ("actor/grad_norm", "train/grad_norm")),
    Chart("Rollout against training", "k3 KL, nats per token", ("rollout_corr/k3_kl",)),
    Chart("Value loss of the critic", "critic", ("critic/vf_loss",)),
)
COST = (
    Chart(
        "Time by phase",
        "seconds of a step, compiling left out",
        (r"timing_s/.+",),
        stacked=True,
        remainder="timing_s/step",
        apart="timing_s/compile",
    ),
    Chart("Throughput", "tokens per second and process", ("perf/throughput",)),
    Chart("Share of the machine's ceiling (MFU)", "of measured matrix products", (r"perf/mfu(/.+)?",)),
    Chart("Memory by role", "GiB of a process", (r"swap/role_gb/.+",), stacked=True),
    Chart("Memory of roles that each phase holds", "GiB of a process", (r"swap/resident_gb/.+",)),
    Chart("Moved out and in", "GiB", ("swap/out_gb", "swap/in_gb")),
    Chart("Memory of the largest process", "GiB", ("perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb")),
)


def resolve(chart: Chart, names: Iterable[str]) -> list[str]:
    """Select a chart's metrics among `names`, in the order of its patterns."""
    names = [name for name in names if name not in (chart.remainder, chart.apart)]
    return list(dict.fromkeys(name for pattern in chart.metrics for name in names if re.fullmatch(pattern, name)))


def chart_data(charts: Sequence[Chart], names: Sequence[str]) -> list[dict[str, Any]]:
    """Collect the data of all charts that have metrics, for the page."""
    return [{**vars(chart), "metrics": metrics} for chart in charts if (metrics := resolve(chart, names))]


def curves(rows: Sequence[Mapping[str, float]]) -> tuple[list[int], dict[str, list[float | None]], int]:
    """Thin out the values of metrics: (steps, metric -> values, steps of one point).

    A point is the mean of several steps and stands at the last of them. Values that are not finite are None, and not in
    a mean.
    """
    width = -(-len(rows) // MOST_POINTS) if rows else 1
    parts = [rows[start : start + width] for start in range(0, len(rows), width)]
    names = sorted({name for row in rows for name in row} - {"step"})
    values = {name: [_mean(part, name) for part in parts] for name in names}
    return [int(part[-1]["step"]) for part in parts], values, width


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row and np.isfinite(row[name])]
    return float(f"{np.mean(values):.{DIGITS}g}") if values else None
