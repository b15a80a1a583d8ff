"""`mindrlhf plot`: learning curves of runs, or one metric of many, as PNG."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.metrics.plot import plot_metric, plot_runs
from mindrlhf.metrics.writers import METRICS_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `mindrlhf plot`."""
    parser.add_argument("runs", nargs="*", type=Path, help=f"output folder of a run, or its {METRICS_FILE}")
    parser.add_argument("--output", type=Path, required=True, help="PNG to write")
    parser.add_argument("--labels", nargs="+", help="a name for each run (default: that of its folder)")
    parser.add_argument(
        "--accuracy",
        nargs="+",
        type=float,
        metavar="BEFORE AFTER",
        help="held-out accuracy before and after each run, 0 to 1",
    )
    parser.add_argument("--metric", help="draw this metric alone, as it is; * stands for anything in its name")
    parser.add_argument(
        "--panel",
        nargs="+",
        action="append",
        metavar=("TITLE", "RUN"),
        help="with --metric, in place of runs and given once for each panel: runs to draw next to one another",
    )
    parser.add_argument("--title", help="line above the curves")


def run(args: argparse.Namespace) -> None:
    """Draw, and print the file's name."""
    if args.metric:
        _plot_metric(args)
        return
    if args.panel:
        raise UserError("--panel goes with --metric; give the metric to draw.")
    if not args.runs:
        raise UserError("there is no run to draw; give the output folder of one.")
    count = len(args.runs)
    if args.labels and len(args.labels) != count:
        raise UserError(f"--labels has {len(args.labels)} names for {count} runs; give one for each run.")
    if args.accuracy and len(args.accuracy) != 2 * count:
        raise UserError(
            f"--accuracy has {len(args.accuracy)} numbers for {count} runs; give two for each run: before and after."
        )
    print(
        plot_runs(
            _metrics_files(args.runs),
            args.output,
            labels=args.labels,
            accuracy=list(zip(args.accuracy[::2], args.accuracy[1::2], strict=True)) if args.accuracy else None,
            title=args.title,
        )
    )


def _plot_metric(args: argparse.Namespace) -> None:
    if args.labels or args.accuracy:
        raise UserError("--labels and --accuracy do not go with --metric; leave them out.")
    if bool(args.panel) == bool(args.runs):
        raise UserError("--metric draws runs, or those of each --panel; give one of the two.")
    for title, *runs in args.panel or ():
        if not runs:
            raise UserError(f"--panel {title} names no run; give its title, then its runs.")
    panels = {title: _metrics_files(map(Path, runs)) for title, *runs in args.panel or ()}
    if args.panel and len(panels) < len(args.panel):
        raise UserError("two --panel have the same title; give each its own.")
    print(plot_metric(panels or {"": _metrics_files(args.runs)}, args.metric, args.output, title=args.title))


def _metrics_files(runs: Iterable[Path]) -> list[Path]:
    return [run / METRICS_FILE if run.is_dir() else run for run in runs]
