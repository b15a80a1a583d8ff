"""`mindrlhf plot`: learning curves of runs as a picture or a table."""

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from mindrlhf.errors import UserError
from mindrlhf.metrics.plot import FORMATS, check_suffix, draw_metric, draw_runs, write_table
from mindrlhf.metrics.writers import METRICS_FILE, run_labels, run_name

TABLE = ".csv"
SEED = re.compile(r"[-_.]?(seed|s)?[-_.]?\d+$")  # end of a folder's name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="*", type=Path, help=f"output folder of a run, or its {METRICS_FILE}")
    kinds = "picture to write, .png, .pdf or .svg; or .csv: a table with a row for each run and step"
    add("--output", type=Path, required=True, help=kinds)
    add("--labels", nargs="+", help="a name for each run (default: that of its folder)")
    accuracy = "held-out accuracy before and after each line, 0 to 1; without numbers: the first and last measured"
    add("--accuracy", nargs="*", type=float, metavar="BEFORE AFTER", help=accuracy)
    add("--metric", help="draw this metric alone, as it is; * stands for anything in its name")
    group = "in place of runs and given once for each line: runs whose mean and standard deviation are drawn"
    add("--group", nargs="+", action="append", metavar=("NAME", "RUN"), help=group)
    seeds = "runs whose folders' names differ only in the number at their end (grpo_seed0, grpo_seed1) are one --group"
    add("--by_seed", action="store_true", help=seeds)
    panel = "with --metric, in place of runs and given once for each panel: runs to draw next to one another"
    add("--panel", nargs="+", action="append", metavar=("TITLE", "RUN"), help=panel)
    add("--title", help="line above the curves")
    add("--size", type=inches, metavar="WIDTHxHEIGHT", help="of the picture, in inches: 7x5")
    smoothing = "width in steps of the Gaussian that smooths curves; 0 draws values (default: a 50th of the steps)"
    add("--smoothing", type=float, metavar="STEPS", help=smoothing)


def inches(text: str) -> tuple[float, float]:
    """Parse a picture's width and height, 7x5."""
    try:
        width, height = map(float, text.split("x"))
    except ValueError:
        width = height = 0.0
    if min(width, height) <= 0:
        raise UserError(f"--size: {text!r} should be two numbers above 0, in inches, as 7x5.")
    return width, height


def run(args: argparse.Namespace) -> None:
    """Draw, and print the file's name."""
    panels, groups = ({name: runs for name, *runs in given or ()} for given in (args.panel, args.group))
    _check(args, panels, groups)
    check_suffix(args.output, (*FORMATS, TABLE))
    if args.by_seed:
        groups = _by_seed(args.runs)
    lines = {name: _metrics_files(runs) for name, runs in groups.items()}
    look = {"title": args.title, "size": args.size, "smoothing": args.smoothing}
    if args.output.suffix == TABLE:
        files = _metrics_files([*args.runs, *(run for runs in (groups | panels).values() for run in runs)])
        files = list(dict.fromkeys(files))
        print(
            write_table(args.output, dict(zip(run_labels(files, args.labels), files, strict=True)), args.metric or "*")
        )
    elif args.metric:
        drawn = {title: _alone(runs) for title, runs in panels.items()}
        print(draw_metric(drawn or {"": lines or _alone(args.runs)}, args.metric, **look).write(args.output))
    else:
        numbers = args.accuracy
        pairs = None if numbers is None else list(zip(numbers[::2], numbers[1::2], strict=True))
        figure = draw_runs(lines or _metrics_files(args.runs), labels=args.labels, accuracy=pairs, **look)
        print(figure.write(args.output))


def _check(args: argparse.Namespace, panels: Mapping[str, list[str]], groups: Mapping[str, list[str]]) -> None:
    """Raise UserError for flags that contradict each other."""
    count = len(args.runs)
    labels = len(args.labels or ())
    for kind, lines, given in (("panel", panels, args.panel), ("group", groups, args.group)):
        for name, runs in lines.items():
            if not runs:
                raise UserError(f"--{kind} {name} names no run; give its name, then its runs.")
        if len(lines) < len(given or ()):
            raise UserError(f"two --{kind} have the same name; give each its own.")
    if groups and (count or labels or panels or args.by_seed):
        raise UserError("--group names runs, so leave out others, --labels, --panel and --by_seed.")
    if args.by_seed and (labels or panels):
        raise UserError("--by_seed names its lines itself; leave out --labels and --panel.")
    if args.smoothing is not None and not args.smoothing >= 0:
        raise UserError(f"--smoothing is {args.smoothing}; give 0 or more steps.")
    if args.metric:
        if labels or args.accuracy is not None:
            raise UserError("--labels and --accuracy do not go with --metric; leave them out.")
        if bool(panels or groups) == bool(count):
            raise UserError("--metric draws runs, or those of each --panel or --group; give one of them.")
        return
    if panels:
        raise UserError("--panel goes with --metric; give the metric to draw.")
    if not count and not groups:
        raise UserError("there is no run to draw; give the output folder of one.")
    if labels not in (0, count):
        raise UserError(f"--labels has {labels} names for {count} runs; give one for each run.")
    numbers = len(args.accuracy or ())
    drawn = len(groups) or (len(_by_seed(args.runs)) if args.by_seed else count)
    if numbers not in (0, 2 * drawn):
        found = f"--accuracy has {numbers} numbers for {drawn} runs"
        raise UserError(f"{found}; give two for each run: before and after.")


def _by_seed(runs: Iterable[Path]) -> dict[str, list[Path]]:
    """Group runs by their folders' names without the number at the end."""
    groups: dict[str, list[Path]] = {}
    for run in runs:
        name = run_name(run)
        groups.setdefault(SEED.sub("", name) or name, []).append(run)
    return groups


def _alone(runs: Iterable[Path | str]) -> dict[str, list[Path]]:
    """Make each run a line of its own, named by its folder."""
    return {run_name(file): [file] for file in _metrics_files(runs)}


def _metrics_files(runs: Iterable[Path | str]) -> list[Path]:
    return [Path(run) / METRICS_FILE if Path(run).is_dir() else Path(run) for run in runs]
