"""Charts of a report (`page/charts.yaml`), with their metrics."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import yaml

MOST_POINTS = 1500  # of one curve; longer runs are shown as means over several steps
DIGITS = 6  # significant, of a number on the page


@dataclass(frozen=True)
class Chart:
    """Chart of some metrics, given as patterns of whole names; left out without any.

    stacked: areas on top of each other, one chart for each run; `remainder` is then the metric that they are parts of,
    together with the metric `apart`; neither is shown.
    """

    title: str
    unit: str
    metrics: tuple[str, ...]
    stacked: bool = False
    remainder: str | None = None
    apart: str | None = None


LEARNING, COST = (
    tuple(Chart(**{**chart, "metrics": tuple(chart["metrics"])}) for chart in section)
    for section in yaml.safe_load((resources.files(__package__) / "page" / "charts.yaml").read_text("utf-8")).values()
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

    A point is the mean of several steps' finite values, at the last of them; None without any.
    """
    width = -(-len(rows) // MOST_POINTS) if rows else 1
    parts = [rows[start : start + width] for start in range(0, len(rows), width)]
    names = sorted({name for row in rows for name in row} - {"step"})
    values = {name: [_mean(part, name) for part in parts] for name in names}
    return [int(part[-1]["step"]) for part in parts], values, width


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row and np.isfinite(row[name])]
    return float(f"{np.mean(values):.{DIGITS}g}") if values else None
