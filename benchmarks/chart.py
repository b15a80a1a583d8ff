"""Charts of the comparison."""

from collections.abc import Sequence
from pathlib import Path

from comparison_table import Outcome, growth_of, seconds
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito 2008: colours that the colour-blind can tell apart.
PHASES = {"generate": "#0072B2", "log-probs": "#E69F00", "train": "#009E73", "the rest": "#999999"}
KEYS = ("gen", "logprob", "train")
INK, FAINT = "#333333", "#DDDDDD"


def bars(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw two bars for each job, ours above the peer's, cut by phase, as parts of the peer's step."""
    figure = Figure(figsize=(10, 1.2 + 0.8 * len(outcomes)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, outcome in enumerate(outcomes):
        unit = outcome.peer["step"]
        for offset, side, name in ((-0.2, outcome.ours, "ours"), (0.2, outcome.peer, "peer")):
            left = 0.0
            parts = [seconds(side, key) / unit for key in KEYS]
            parts.append(side["step"] / unit - sum(parts))
            for part, (phase, colour) in zip(parts, PHASES.items(), strict=True):
                label = phase if index == 0 and name == "ours" else None
                axes.barh(index + offset, part, left=left, height=0.36, color=colour, label=label)
                left += part
            text = f"{name} {side['step']:.2f} s" + (f": {outcome.ratio('step'):.2f}" if name == "ours" else "")
            axes.text(left + 0.01, index + offset, text, va="center", fontsize=9, color=INK)
    axes.set_yticks(range(len(outcomes)), [outcome.name for outcome in outcomes])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25)
    axes.set_xlabel("seconds of a step, as a part of the peer's", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK, ncols=len(PHASES), loc="lower left", bbox_to_anchor=(0, 1))
    _style(axes, "x")
    figure.savefig(path, format="png", dpi=120)


def growth(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw step time per response token over the samples of a prompt; writes no file for fewer than two points."""
    points = growth_of(outcomes)
    if len(points) < 2:
        return
    figure = Figure(figsize=(6, 4), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    samples = [count for count, _ in points]
    for which, (name, colour) in enumerate((("ours", "#0072B2"), ("peer", "#D55E00"))):
        values = [1000 * outcome.seconds_per_token[which] for _, outcome in points]
        axes.plot(samples, values, marker="o", linewidth=2, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(samples, [str(count) for count in samples])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("samples of a prompt", fontsize=9, color=INK)
    axes.set_ylabel("milliseconds for each response token", fontsize=9, color=INK)
    axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    _style(axes, "y")
    figure.savefig(path, format="png", dpi=120)


def _style(axes, grid: str) -> None:
    axes.grid(axis=grid, color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=9, colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
