"""Draw the table of lora_grid.sh: accuracy over the learning rate, a curve for each rank.

python scripts/lora_grid_figure.py out/lora_grid/table.txt out/lora_grid/lora_grid.png
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from mindrlhf.files.atomic import atomic_file
from mindrlhf.metrics.plot import COLOURS

ROW = re.compile(r"(\w+) +(warm start|full|rank \d+) +(-|[\d.e-]+) +([\d.]+) \+- ([\d.]+) ")
MARKERS = "osD^v"


def read(table: Path) -> dict[str, dict[str, list[tuple[float, float, float]]]]:
    """Read task -> trained part -> (rate, mean, spread) of each row; the rate of the warm start is 0."""
    found = defaultdict(lambda: defaultdict(list))
    for task, name, rate, *numbers in ROW.findall(table.read_text()):
        found[task][name].append((0.0 if rate == "-" else float(rate), *map(float, numbers)))
    return found


def draw(tasks: dict[str, dict[str, list[tuple[float, float, float]]]]) -> Figure:
    """Draw one panel for each task; bars extend one standard deviation over seeds to both sides."""
    figure = Figure(figsize=(5.2 * len(tasks), 4.2), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for panel, (task, curves) in zip(panels, tasks.items(), strict=True):
        for _, mean, _ in curves.pop("warm start", ()):
            panel.axhline(mean, color="grey", linestyle=":", label="warm start")
        for (name, points), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
            rates, means, spreads = zip(*points, strict=True)
            panel.errorbar(rates, means, spreads, label=name, color=colour, marker=marker, capsize=3)
        panel.set(title=task, xscale="log", xlabel="learning rate", ylim=(0, 1.02))
    panels[0].set_ylabel("held-out accuracy, greedy: mean over seeds")
    panels[-1].legend()
    return figure


def main(table: str, output: str) -> None:
    with atomic_file(Path(output)) as temporary:
        draw(read(Path(table))).savefig(temporary, format="png", dpi=130)


if __name__ == "__main__":
    matplotlib.use("Agg")
    main(*sys.argv[1:])
