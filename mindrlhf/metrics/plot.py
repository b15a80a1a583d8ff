"""Learning curves of one or several runs as one figure; `plot.mplstyle` is their style."""

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from functools import reduce
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.files.text import nearest, some
from mindrlhf.metrics.console import ACCURACY, LOSS, REWARD
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
        ("Load of experts", "balance; 1: all chosen alike", "actor/expert_balance"),
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
FORMATS: Mapping[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
STYLES = ("-", "--", ":")  # once all colours are taken
LETTER, HANDLE = 0.08, 0.75  # inches that a legend's letter takes, and its line with the space around it

Run = Mapping[str, tuple[np.ndarray, np.ndarray]]
Lines = Mapping[str, Sequence[Run]]  # name -> its runs, whose mean is drawn


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
        return self.picture(".png")

    def picture(self, suffix: str) -> bytes:
        """Return the figure in the format of a suffix in `FORMATS`, without a date."""
        buffer = BytesIO()
        with _style():
            self.savefig(buffer, format=suffix[1:], metadata=FORMATS[suffix])
        return buffer.getvalue()

    def write(self, path: Path) -> Path:
        """Write a picture whole, or not at all; returns its path.

        The suffix names its format. UserError for another suffix.
        """
        check_suffix(path, FORMATS)
        with atomic_file(path, durable=False) as temporary:
            temporary.write_bytes(self.picture(path.suffix))
        return path


def check_suffix(path: Path, known: Collection[str]) -> None:
    """Raise UserError for a file of another kind."""
    if path.suffix not in known:
        found = f"ends in {path.suffix}" if path.suffix else "has no suffix"
        raise UserError(f"{path}: {found}; give a name that ends in {' or '.join(known)}.")


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


def _curves(axes: Axes, lines: Lines, metric: str, smoothing: float | None) -> None:
    for index, (label, runs) in enumerate(lines.items()):
        curves = [run[metric] for run in runs if metric in run]
        look = {"color": COLOURS[index % len(COLOURS)]}
        if len(curves) == 1:
            steps, values = curves[0]
            axes.plot(steps, values, alpha=0.25, linewidth=1, **look)
            marker = "o" if len(steps) == 1 else None  # a line of one point cannot be seen
            axes.plot(steps, _smoothed(values, smoothing), linewidth=2, marker=marker, label=label, **look)
        elif curves:
            smoothed = [(steps, _smoothed(values, smoothing)) for steps, values in curves]
            _band(axes, smoothed, linewidth=2, label=f"{label} ({len(curves)} runs)", **look)


def _smoothed(values: np.ndarray, width: float | None) -> np.ndarray:
    """Smooth values by a width in steps; None chooses it, 0 leaves them."""
    if width == 0:
        return values
    return smooth(values, max(1.0, len(values) / 50) if width is None else width)


def _band(axes: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], color: str, **look: Any) -> Line2D:
    """Draw the mean of curves, and one standard deviation around it."""
    steps = reduce(np.intersect1d, (steps for steps, _ in curves))
    values = np.stack([known[np.isin(own, steps)] for own, known in curves])
    mean = values.mean(axis=0)
    deviation = values.std(axis=0, ddof=1)
    axes.fill_between(steps, mean - deviation, mean + deviation, color=color, alpha=0.2, linewidth=0)
    (line,) = axes.plot(steps, mean, color=color, **look)
    return line


def _before_and_after(axes: Axes, names: Sequence[str], accuracy: Sequence[tuple[float, float]]) -> None:
    """Draw two bars with numbers for each run: before in grey, after in colour."""
    for index, (before, after) in enumerate(accuracy):
        for offset, value, shade in ((-0.2, before, "#BBBBBB"), (0.2, after, COLOURS[index % len(COLOURS)])):
            axes.bar(index + offset, value, width=0.36, color=shade)
            axes.text(index + offset, value + 0.02, f"{value:.2f}", ha="center", fontsize=9)
    axes.set_xticks(range(len(names)), names if len(names) > 1 else [""])
    axes.set(xlabel="before (grey) and after GRPO", xlim=(-0.7, len(names) - 0.3), ylim=(0, 1.05))
    axes.set_yticks(np.linspace(0, 1, 6))


def measured_accuracy(runs: Sequence[Run]) -> tuple[float, float]:
    """Compute the first and the last held-out accuracy.

    They are means over runs and their sources. Raises UserError without a measurement.
    """
    curves = [values for run in runs for name, (_, values) in run.items() if ACCURACY.fullmatch(name)]
    if not curves:
        raise UserError("--accuracy: a run has measured none; set data.val_dataset, or give two numbers for each run.")
    return float(np.mean([values[0] for values in curves])), float(np.mean([values[-1] for values in curves]))


def draw_runs(
    paths: Sequence[Path] | Mapping[str, Sequence[Path]],
    labels: Sequence[str] | None = None,
    accuracy: Sequence[tuple[float, float]] | None = None,
    title: str | None = None,
    size: tuple[float, float] | None = None,
    smoothing: float | None = None,
) -> Curves:
    """Draw reward, KL, response length and entropy by step.

    For runs with tools, calls and their failures replace length and entropy; for models with experts, their load
    replaces the length; for fine-tuning, loss, held-out loss and gradient norm are drawn.
    paths: `metrics.jsonl` of each run, or of the runs of each line by its name: mean and standard deviation are drawn.
    A metric that no run has gets no panel. labels: names of runs, by default the folders'. accuracy: held-out accuracy
    (before, after) of each line, 0 to 1, drawn as bars; empty: as measured. size: inches. smoothing: width in steps.
    UserError for a file that is absent or not a metrics file.
    """
    if not isinstance(paths, Mapping):
        paths = {name: [path] for name, path in zip(run_labels(paths, labels), paths, strict=True)}
    lines = {name: [_read_run(Path(path)) for path in files] for name, files in paths.items()}
    runs = [run for group in lines.values() for run in group]
    guide = next((metric for metric in GUIDES if all(metric in run for run in runs)), REWARD)
    for run, path in zip(runs, (path for files in paths.values() for path in files), strict=True):
        if guide not in run:
            raise UserError(f"{path} has no {guide}: give the metrics.jsonl of a run with at least one step")
    if accuracy is not None and not accuracy:
        accuracy = list(map(measured_accuracy, lines.values()))
    found = [[panel for panel in choices if any(panel[2] in run for run in runs)] for choices in PANELS]
    panels = [place[0] for place in found if place]
    upper = [[guide, guide, "accuracy"] if accuracy else [guide]]
    rows = [[upper], [[[metric for _, _, metric in panels]]]] if panels else upper
    with _drawing(title, *(size or (10, 7 if panels else 4.2))) as figure:
        places = figure.subplot_mosaic(rows, height_ratios=(1.25, 1)[: len(rows)])
        for heading, unit, metric in ((*GUIDES[guide], guide), *panels):
            _curves(_name(places[metric], heading, unit), lines, metric, smoothing)
        if len(runs) > 1:
            places[guide].legend()
        if accuracy:
            _before_and_after(_name(places["accuracy"], "Held-out accuracy", ""), list(lines), accuracy)
    return figure


def draw_metric(
    panels: Mapping[str, Mapping[str, Sequence[Path]]],
    metric: str,
    title: str | None = None,
    size: tuple[float, float] | None = None,
    smoothing: float | None = None,
) -> Curves:
    """Draw one metric of many runs in panels.

    panels: title of a panel -> name of a line -> `metrics.jsonl` of its runs; one name has one colour in all panels.
    metric: its name, in which * stands for anything; the first in alphabetical order is drawn, a point for each step
    that has it. size: inches. smoothing: width in steps, none by default. UserError for a file that is absent, not a
    metrics file, or without such a metric.
    """
    curves = {
        heading: {
            name: [
                (steps, _smoothed(values, smoothing or 0))
                for steps, values in (_read_metric(one, metric) for one in files)
            ]
            for name, files in lines.items()
        }
        for heading, lines in panels.items()
    }
    names = list(dict.fromkeys(name for lines in curves.values() for name in lines))
    handles = {}
    with _drawing(title, *(size or (1 + 4.5 * len(curves), 4.6))) as figure:
        row = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (heading, lines) in zip(row, curves.items(), strict=True):
            _name(axes, heading, "")
            for name, runs in lines.items():
                turn, index = divmod(names.index(name), len(COLOURS))
                look = {"linestyle": STYLES[turn % len(STYLES)], "marker": "o", "markersize": 3.5, "linewidth": 1.8}
                draw = _band if len(runs) > 1 else _line
                handles[name] = draw(axes, runs, color=COLOURS[index], **look)
        columns = min(len(names), 4 * len(curves), _columns(names, figure.get_figwidth()))
        figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=columns)
    return figure


def _columns(names: Sequence[str], width: float) -> int:
    """Count the columns of a legend that fit into inches of width."""
    entry = LETTER * max(map(len, names)) + HANDLE
    return max(1, int(width / entry))


def _line(axes: Axes, curves: Sequence[tuple[np.ndarray, np.ndarray]], **look: Any) -> Line2D:
    (line,) = axes.plot(*curves[0], **look)
    return line


def _read_metric(path: Path, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Read (steps, values) of the first metric that fits the pattern."""
    run = _read_run(Path(path))
    names = sorted(name for name in run if fnmatchcase(name, pattern))
    if not names:
        near = nearest(pattern, run)
        raise UserError(
            f"{path} has no metric {pattern}; {f'did you mean {near}?' if near else f'it has {some(sorted(run), 8)}.'}"
        )
    return run[names[0]]


def write_table(path: Path, runs: Mapping[str, Path], pattern: str = "*") -> Path:
    """Write the metrics of runs as CSV, a row for each step.

    Returns its path. runs: name -> `metrics.jsonl`. pattern: of the metrics' names, in which * stands for anything.
    UserError for a file that is absent or not a metrics file.
    """
    tables = {name: read_metrics(file) for name, file in runs.items()}
    known = {metric for rows in tables.values() for row in rows for metric in row if fnmatchcase(metric, pattern)}
    metrics = sorted(known - {"step"})
    with atomic_file(path, durable=False) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "step", *metrics])
        for name, rows in tables.items():
            writer.writerows([name, row["step"], *(row.get(metric, "") for metric in metrics)] for row in rows)
    return path
