"""Charts of a report (`page/charts.yaml`), with their metrics."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import numpy as np
import yaml

MOST_POINTS = 1500  # of one curve; longer runs are shown as means over several steps
DIGITS = 6  # significant, of a number on the page


@dataclass(frozen=True)
class Chart:
    """Chart of some metrics, given as patterns of whole names; left out without any.

    kind: `lines`; `areas` on top of each other, one chart for each run; for a run with answers also its `rewards` and
    `lengths` (`distributions`), without metrics. least: the fewest metrics that make a chart. share: values are from 0
    to 1, and so is the axis. noise: the largest size of rounding, which is shown as 0 is. remainder: of areas, the
    metric whose parts are the areas and the metric `apart`; neither is shown.
    """

    title: str
    unit: str
    metrics: tuple[str, ...] = ()
    kind: Literal["lines", "areas", "rewards", "lengths"] = "lines"
    least: int = 1
    share: bool = False
    noise: float = 0.0
    remainder: str | None = None
    apart: str | None = None


LEARNING, COST = (
    tuple(Chart(**{**chart, "metrics": tuple(chart.get("metrics", ()))}) for chart in section)
    for section in yaml.safe_load((resources.files(__package__) / "page" / "charts.yaml").read_text("utf-8")).values()
)


def resolve(chart: Chart, names: Iterable[str]) -> list[str]:
    """Select a chart's metrics among `names`, in the order of its patterns."""
    names = [name for name in names if name not in (chart.remainder, chart.apart)]
    return list(dict.fromkeys(name for pattern in chart.metrics for name in names if re.fullmatch(pattern, name)))


def chart_data(charts: Sequence[Chart], names: Sequence[str], answers: bool) -> list[dict[str, Any]]:
    """Collect the data of all charts that have metrics."""
    found = [(chart, resolve(chart, names)) for chart in charts]
    return [
        {**vars(chart), "metrics": metrics}
        for chart, metrics in found
        if len(metrics) >= chart.least or (answers and not chart.metrics)
    ]


def curves(rows: Sequence[Mapping[str, float]]) -> tuple[list[int], dict[str, list[float | None]], int]:
    """Thin out the values of metrics: (steps, metric -> values, steps of one point).

    A point is the mean of several steps' finite values, placed at the last step; None without any.
    """
    width = -(-len(rows) // MOST_POINTS) if rows else 1
    parts = [rows[start : start + width] for start in range(0, len(rows), width)]
    names = sorted({name for row in rows for name in row} - {"step"})
    values = {name: [_mean(part, name) for part in parts] for name in names}
    return [int(part[-1]["step"]) for part in parts], values, width


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row and np.isfinite(row[name])]
    return float(f"{np.mean(values):.{DIGITS}g}") if values else None
