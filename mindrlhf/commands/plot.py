"""`mindrlhf plot`: learning curves of runs, or one metric of many runs, as PNG."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from mindrlhf.errors import refuse
from mindrlhf.metrics.plot import draw_metric, draw_runs
from mindrlhf.metrics.writers import METRICS_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", type=Path, help=f"output folder of a run, or its {METRICS_FILE}")
    add("--output", type=Path, required=True, help="PNG to write")
    add("--labels", nargs="+", help="a name for each run (default: that of its folder)")
    accuracy = "held-out accuracy before and after each run, 0 to 1"
    add("--accuracy", nargs="+", type=float, metavar="BEFORE AFTER", help=accuracy)
    add("--metric", help="draw this metric alone, as it is; * stands for anything in its name")
    panel = "with --metric, in place of runs and given once for each panel: runs to draw next to one another"
    add("--panel", nargs="+", action="append", metavar=("TITLE", "RUN"), help=panel)
    add("--title", help="line above the curves")


def run(args: argparse.Namespace) -> None:
    """Draw, and print the file's name."""
    panels = {title: runs for title, *runs in args.panel or ()}
    count, labels, numbers = len(args.runs), len(args.labels or ()), len(args.accuracy or ())
    uneven = numbers not in (0, 2 * count)
    empty = next((title for title, runs in panels.items() if not runs), None)
    if args.metric:
        faults = {
            "--labels and --accuracy do not go with --metric; leave them out.": labels or numbers,
            "--metric draws runs, or those of each --panel; give one of the two.": bool(panels) == bool(count),
            f"--panel {empty} names no run; give its title, then its runs.": empty is not None,
            "two --panel have the same title; give each its own.": len(panels) < len(args.panel or ()),
        }
    else:
        faults = {
            "--panel goes with --metric; give the metric to draw.": panels,
            "there is no run to draw; give the output folder of one.": not count,
            f"--labels has {labels} names for {count} runs; give one for each run.": labels not in (0, count),
            f"--accuracy has {numbers} numbers for {count} runs; give two for each run: before and after.": uneven,
        }
    refuse(faults)
    if args.metric:
        drawn = {title: _metrics_files(map(Path, runs)) for title, runs in panels.items()}
        figure = draw_metric(drawn or {"": _metrics_files(args.runs)}, args.metric, title=args.title)
        print(figure.write(args.output))
        return
    pairs = list(zip(args.accuracy[::2], args.accuracy[1::2], strict=True)) if args.accuracy else None
    figure = draw_runs(_metrics_files(args.runs), labels=args.labels, accuracy=pairs, title=args.title)
    print(figure.write(args.output))


def _metrics_files(runs: Iterable[Path]) -> list[Path]:
    return [run / METRICS_FILE if run.is_dir() else run for run in runs]
