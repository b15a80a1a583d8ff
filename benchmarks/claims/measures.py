"""Figures of a finished run by step: its metrics, and some that only its answers show."""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindrlhf.files.naming import ROLLOUTS_FOLDER, TEXT, step_files
from mindrlhf.metrics.writers import METRICS_FILE, read_metrics

# Metrics that depend on the machine.
OF_THE_MACHINE = ("timing", "perf/", "swap/")
STEP = "step"

Figures = dict[str, dict[int, float]]
"""Metric -> step -> value."""


def read_figures(folder: Path, reward: str) -> Figures:
    """Read a run's figures from its output folder; reward: function that gives 1 to a right answer."""
    figures: Figures = defaultdict(dict)
    for row in read_metrics(folder / METRICS_FILE):
        for name, value in row.items():
            if name != STEP and not name.startswith(OF_THE_MACHINE) and math.isfinite(value):
                figures[name][int(row[STEP])] = value
    for step, path in step_files(folder / ROLLOUTS_FOLDER, TEXT).items():
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for name, value in answer_figures(rows, reward).items():
            figures[name][step] = value
    return dict(figures)


def answer_figures(rows: Sequence[Mapping[str, Any]], reward: str) -> dict[str, float]:
    """Figures of a step's answers.

    answers/wrong_length, answers/right_length: mean sampled tokens of wrong and right answers. answers/one_sided: share
    of the sum of absolute advantages that belongs to groups with at most one right or at most one wrong answer.
    """
    lengths: dict[bool, list[int]] = {True: [], False: []}
    groups: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        lengths[row["rewards"][reward] > 0].append(row["response_length"])
        groups[row["prompt_id"]].append(row)
    found = {f"answers/{name}_length": lengths[right] for name, right in (("right", True), ("wrong", False))}
    figures = {name: statistics.fmean(values) for name, values in found.items() if values}
    one_sided = total = 0.0
    for group in groups.values():
        right = sum(row["rewards"][reward] > 0 for row in group)
        weight = math.fsum(abs(row["advantage"]) for row in group)
        total += weight
        one_sided += weight if min(right, len(group) - right) <= 1 else 0.0
    return figures | ({"answers/one_sided": one_sided / total} if total else {})


def window_mean(figures: Mapping[str, Mapping[int, float]], metric: str, first: int, last: int) -> float | None:
    """Mean of a metric over the steps of a window that have it; None if none has."""
    values = [value for step, value in figures.get(metric, {}).items() if first <= step <= last]
    return statistics.fmean(values) if values else None
