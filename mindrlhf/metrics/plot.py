"""Learning curves of one or several runs as one PNG."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.metrics.console import REWARD
from mindrlhf.metrics.run_writers import run_labels
from mindrlhf.metrics.writers import read_metrics

# Okabe and Ito 2008: the colour-blind can distinguish them, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PANELS = (  # (title, what the y axis is, metric): of each place, the first that the runs have is drawn
    (
        ("KL to the reference model", "nats per token", "actor/kl_loss"),
        ("Groups that all score the same", "fraction of groups", "group/zero_std_fraction"),
    ),
    (("Response length", "tokens", "response_length/mean"),),
    (("Entropy", "nats per token", "actor/entropy"),),
)
STYLES = ("-", "--", ":")  # once all colours are taken
INK, FAINT = "#333333", "#DDDDDD"

Run = Mapping[str, tuple[np.ndarray, np.ndarray]]


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Smooth values by a Gaussian of `width` steps (standard deviation).

    It looks to both sides, so that a rising curve is not shown late. NaN and infinities have no influence; where all
    neighbours are non-finite, the result is NaN.
    """
    reach = int(4 * width) + 1
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    known = np.isfinite(values)
    inside = slice(reach, reach + len(values))
    weight = np.convolve(known.astype(np.float64), kernel)[inside]
    total = np.convolve(np.where(known, values, 0.0), kernel)[inside]
    return np.divide(total, weight, out=np.full(len(values), np.nan), where=weight > 0)


def _read_run(path: Path) -> Run:
    """Read (steps, values) of each metric, of the steps that have it."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in read_metrics(path):
        for name in row.keys() - {"step"}:
            points.setdefault(name, []).append((row["step"], row[name]))
    return {name: tuple(np.array(pairs, np.float64).T) for name, pairs in points.items()}


def _figure(width: float, height: float) -> Figure:
    """Make an empty figure; sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    return figure


def _style(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_ylabel(unit, fontsize=9, color=INK)
    axes.set_xlabel("step", fontsize=9, color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.margins(x=0.02)


def _curves(axes: Axes, runs: Mapping[str, Run], metric: str, smoothing: float | None) -> None:
    """Draw the values of the steps, pale, and their smoothed curve."""
    for (label, run), colour in zip(runs.items(), _colours(runs), strict=True):
        if metric in run:
            steps, values = run[metric]
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            width = max(1.0, len(steps) / 50) if smoothing is None else smoothing
            marker = "o" if len(steps) == 1 else None  # a line of one point cannot be seen
            axes.plot(steps, smooth(values, width), color=colour, linewidth=2, marker=marker, label=label)


def _colours(runs: Mapping[str, Run]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(runs))]


def _before_and_after(axes: Axes, runs: Mapping[str, Run], accuracy: Sequence[tuple[float, float]]) -> None:
    """Draw two bars for each run: before in grey, after in colour.

    Each has its number.
    """
    for index, ((before, after), colour) in enumerate(zip(accuracy, _colours(runs), strict=True)):
        for offset, value, shade in ((-0.2, before, "#BBBBBB"), (0.2, after, colour)):
            axes.bar(index + offset, value, width=0.36, color=shade)
            axes.text(index + offset, value + 0.02, f"{value:.2f}", ha="center", fontsize=9, color=INK)
    axes.set_xticks(range(len(runs)), list(runs) if len(runs) > 1 else [""])
    axes.set_xlabel("before (grey) and after GRPO", fontsize=9, color=INK)
    axes.set_xlim(-0.7, len(runs) - 0.3)
    axes.set_ylim(0, 1.05)
    axes.set_yticks(np.linspace(0, 1, 6))


def _panels(runs: Mapping[str, Run]) -> list[tuple[str, str, str]]:
    """List (title, unit, metric) of the small panels with data."""
    panels = []
    for choices in PANELS:
        panels += [panel for panel in choices if any(panel[2] in run for run in runs.values())][:1]
    return panels


def plot_runs(
    paths: Sequence[Path],
    output_png: Path,
    labels: Sequence[str] | None = None,
    accuracy: Sequence[tuple[float, float]] | None = None,
    title: str | None = None,
    smoothing: float | None = None,
) -> Path:
    """Draw reward, KL, response length and entropy by step; returns `output_png`.

    The file is written whole or not at all.
    paths: `metrics.jsonl` of each run; a metric that no run has gets no panel.
    labels: a name for each run; the name of its folder by default.
    accuracy: held-out accuracy (before, after) of each run, 0 to 1, drawn as bars next to the reward.
    smoothing: width of `smooth` in steps; by default a fiftieth of the run, at least 1.

    Raises UserError for a file that is absent or not a metrics file.
    """
    paths = [Path(path) for path in paths]
    names = run_labels(paths, labels)
    runs = {name: _read_run(path) for name, path in zip(names, paths, strict=True)}
    for run, path in zip(runs.values(), paths, strict=True):
        if REWARD not in run:
            raise UserError(f"{path} has no {REWARD}: give the metrics.jsonl of a run with at least one step")
    panels = _panels(runs)
    figure = _figure(10, 7 if panels else 4.2)
    rows = figure.add_gridspec(2, 1, height_ratios=(1.25, 1)) if panels else figure.add_gridspec(1, 1)
    upper = rows[0].subgridspec(1, 1 if accuracy is None else 2, width_ratios=None if accuracy is None else (2, 1))
    reward = figure.add_subplot(upper[0])
    _style(reward, "Reward (mean of a step)", "reward")
    _curves(reward, runs, REWARD, smoothing)
    if len(runs) > 1:
        reward.legend(frameon=False, fontsize=9, labelcolor=INK)
    if accuracy is not None:
        bars = figure.add_subplot(upper[1])
        _style(bars, "Held-out accuracy", "")
        _before_and_after(bars, runs, accuracy)
    if panels:
        lower = rows[1].subgridspec(1, len(panels))
        for cell, (heading, unit, metric) in zip(lower, panels, strict=True):
            axes = figure.add_subplot(cell)
            _style(axes, heading, unit)
            _curves(axes, runs, metric, smoothing)
    return _save(figure, title, Path(output_png))


def plot_metric(
    panels: Mapping[str, Sequence[Path]], metric: str, output_png: Path, title: str | None = None, unit: str = ""
) -> Path:
    """Draw one metric of many runs in panels; returns `output_png`.

    The file is written whole or not at all.
    panels: title of a panel -> `metrics.jsonl` of its runs, called by the name of their folder; runs of the same name
    have the same colour in all panels. metric: its name, in which * stands for anything; of several that fit, the first
    in alphabetical order is drawn. It is drawn as it is, a point for each step that has it. unit: of the y axis.

    Raises UserError for a file that is absent, not a metrics file, or without such a metric.
    """
    curves = {
        heading: {Path(path).resolve().parent.name: _read_metric(Path(path), metric) for path in paths}
        for heading, paths in panels.items()
    }
    names = list(dict.fromkeys(name for runs in curves.values() for name in runs))
    figure = _figure(1 + 4.5 * len(curves), 4.6)
    lines = {}
    for axes, (heading, runs) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        _style(axes, heading, unit)
        for name, (steps, values) in runs.items():
            index = names.index(name)
            colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
            (lines[name],) = axes.plot(steps, values, style, color=colour, linewidth=1.8, marker="o", markersize=3.5)
    figure.legend(
        [lines[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(names), 4 * len(curves)),
        frameon=False,
        fontsize=9,
        labelcolor=INK,
    )
    return _save(figure, title, Path(output_png))


def _save(figure: Figure, title: str | None, output_png: Path) -> Path:
    """Write the figure under its title atomically; returns `output_png`."""
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", color=INK)
    with atomic_file(output_png, durable=False) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return output_png


def _read_metric(path: Path, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Read (steps, values) of the first metric that fits the pattern."""
    run = _read_run(path)
    names = sorted(name for name in run if fnmatchcase(name, pattern))
    if not names:
        raise UserError(f"{path} has no metric {pattern}: give one that the run has measured")
    return run[names[0]]
