"""Learning curves of one or several runs as one figure; `plot.mplstyle` is their style."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from io import BytesIO
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.metrics.console import LOSS, REWARD
from mindrlhf.metrics.writers import read_metrics, run_labels

# Okabe and Ito 2008: the colour-blind can distinguish them, too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
PANELS = (  # (title, y axis, metric); in each place, the first metric that the runs have is drawn
    (
        ("KL to the reference model", "nats per token", "actor/kl_loss"),
        ("Groups that all score the same", "fraction of groups", "group/zero_std_fraction"),
        ("Held-out loss", "nats per token", "val/loss"),
    ),
    (
        ("Calls of tools", "calls in a conversation", "tools/call_frequency"),
        ("Response length", "tokens", "response_length/mean"),
        ("Gradient norm", "before clipping", "actor/grad_norm"),
    ),
    (
        ("Failed calls", "fraction of calls", "tools/failure_frequency"),
        ("Entropy", "nats per token", "actor/entropy"),
    ),
)
GUIDES = {  # metric that runs improve -> (title, y axis); the first that all runs have is drawn
    REWARD: ("Reward (mean of a step)", "reward"),
    LOSS: ("Loss on demonstrations", "nats per token"),
}
STYLES = ("-", "--", ":")  # once all colours are taken

Run = Mapping[str, tuple[np.ndarray, np.ndarray]]


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Smooth values by a Gaussian of `width` steps, to both sides.

    NaN and infinities have no influence; where all neighbours are non-finite, the result is NaN.
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


class Curves(Figure):
    """Figure in this style, which a notebook shows by itself."""

    def _repr_png_(self) -> bytes:
        return self.png()

    def png(self) -> bytes:
        """Return the figure as a PNG."""
        buffer = BytesIO()
        with _style():
            self.savefig(buffer, format="png")
        return buffer.getvalue()

    def write(self, path: Path) -> Path:
        """Write a PNG whole, or not at all; returns its path."""
        with atomic_file(path, durable=False) as temporary:
            temporary.write_bytes(self.png())
        return path


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(fname=Path(__file__).with_name("plot.mplstyle"))


@contextmanager
def _drawing(title: str | None, width: float, height: float) -> Iterator[Curves]:
    """Yield an empty figure, sizes in inches."""
    with _style():
        figure = Curves(figsize=(width, height), layout="constrained")
        yield figure
        if title:
            figure.suptitle(title)


def _name(axes: Axes, title: str, unit: str) -> Axes:
    axes.set(title=title, ylabel=unit, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return axes


def _curves(axes: Axes, runs: Mapping[str, Run], metric: str) -> None:
    for index, (label, run) in enumerate(runs.items()):
        if metric in run:
            steps, values = run[metric]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
            smoothed = smooth(values, max(1.0, len(steps) / 50))
            marker = "o" if len(steps) == 1 else None  # a line of one point cannot be seen
            axes.plot(steps, smoothed, color=colour, linewidth=2, marker=marker, label=label)


def _before_and_after(axes: Axes, names: Sequence[str], accuracy: Sequence[tuple[float, float]]) -> None:
    """Draw two bars with numbers for each run: before in grey, after in colour."""
    for index, (before, after) in enumerate(accuracy):
        for offset, value, shade in ((-0.2, before, "#BBBBBB"), (0.2, after, COLOURS[index % len(COLOURS)])):
            axes.bar(index + offset, value, width=0.36, color=shade)
            axes.text(index + offset, value + 0.02, f"{value:.2f}", ha="center", fontsize=9)
    axes.set_xticks(range(len(names)), names if len(names) > 1 else [""])
    axes.set(xlabel="before (grey) and after GRPO", xlim=(-0.7, len(names) - 0.3), ylim=(0, 1.05))
    axes.set_yticks(np.linspace(0, 1, 6))


def draw_runs(
    paths: Sequence[Path],
    labels: Sequence[str] | None = None,
    accuracy: Sequence[tuple[float, float]] | None = None,
    title: str | None = None,
) -> Curves:
    """Draw reward, KL, response length and entropy by step.

    For runs with tools, calls and their failures replace length and entropy; for fine-tuning, loss, held-out loss and
    gradient norm are drawn.
    paths: `metrics.jsonl` of each run; a metric that no run has gets no panel. labels: names, by default the folders'.
    accuracy: held-out accuracy (before, after) of each run, 0 to 1, drawn as bars. UserError for a file that is absent
    or not a metrics file.
    """
    paths = [Path(path) for path in paths]
    names = run_labels(paths, labels)
    runs = {name: _read_run(path) for name, path in zip(names, paths, strict=True)}
    guide = next((metric for metric in GUIDES if all(metric in run for run in runs.values())), REWARD)
    for run, path in zip(runs.values(), paths, strict=True):
        if guide not in run:
            raise UserError(f"{path} has no {guide}: give the metrics.jsonl of a run with at least one step")
    found = [[panel for panel in choices if any(panel[2] in run for run in runs.values())] for choices in PANELS]
    panels = [place[0] for place in found if place]
    upper = [[guide, guide, "accuracy"] if accuracy else [guide]]
    rows = [[upper], [[[metric for _, _, metric in panels]]]] if panels else upper
    with _drawing(title, 10, 7 if panels else 4.2) as figure:
        places = figure.subplot_mosaic(rows, height_ratios=(1.25, 1)[: len(rows)])
        for heading, unit, metric in ((*GUIDES[guide], guide), *panels):
            _curves(_name(places[metric], heading, unit), runs, metric)
        if len(runs) > 1:
            places[guide].legend()
        if accuracy:
            _before_and_after(_name(places["accuracy"], "Held-out accuracy", ""), names, accuracy)
    return figure


def draw_metric(panels: Mapping[str, Sequence[Path]], metric: str, title: str | None = None) -> Curves:
    """Draw one metric of many runs in panels.

    panels: title of a panel -> `metrics.jsonl` of its runs, named by their folders; one name has one colour in all
    panels. metric: its name, in which * stands for anything; the first in alphabetical order is drawn, a point for each
    step that has it. UserError for a file that is absent, not a metrics file, or without such a metric.
    """
    curves = {
        heading: {Path(path).resolve().parent.name: _read_metric(Path(path), metric) for path in paths}
        for heading, paths in panels.items()
    }
    names = list(dict.fromkeys(name for runs in curves.values() for name in runs))
    lines = {}
    with _drawing(title, 1 + 4.5 * len(curves), 4.6) as figure:
        row = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (heading, runs) in zip(row, curves.items(), strict=True):
            _name(axes, heading, "")
            for name, (steps, values) in runs.items():
                turn, index = divmod(names.index(name), len(COLOURS))
                look = {"linestyle": STYLES[turn % len(STYLES)], "marker": "o", "markersize": 3.5, "linewidth": 1.8}
                (lines[name],) = axes.plot(steps, values, color=COLOURS[index], **look)
        columns = min(len(names), 4 * len(curves))
        figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=columns)
    return figure


def _read_metric(path: Path, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Read (steps, values) of the first metric that fits the pattern."""
    run = _read_run(path)
    names = sorted(name for name in run if fnmatchcase(name, pattern))
    if not names:
        raise UserError(f"{path} has no metric {pattern}: give one that the run has measured")
    return run[names[0]]
