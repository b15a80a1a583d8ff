"""`mindrlhf report`: runs as one HTML file, or compared by the acceptance rules."""

import argparse
from pathlib import Path
from time import sleep

from mindrlhf.errors import UserError, refuse
from mindrlhf.files.atomic import atomic_file
from mindrlhf.metrics.compare import compare
from mindrlhf.metrics.report.html import render
from mindrlhf.metrics.report.run import read_run
from mindrlhf.metrics.writers import run_folder, run_labels

FILE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run")
    add("--output", type=Path, help=f"file to write (default: {FILE} in the first run's folder)")
    add("--labels", nargs="+", help="a name for each run (default: that of its folder)")
    add("--samples", type=int, default=8, help="answers of each step to bring along (default 8)")
    add("--sample_steps", type=int, default=40, help="steps to bring answers of, at most (default 40)")
    agree = "state whether two runs agree (reward within 4%%, loss within 2%%): exit code 0, or 1 where they do not"
    add("--compare", action="store_true", help=agree)
    add("--live", "--serve", action="store_true", help="rewrite the file while the runs go on; Ctrl-C ends it")
    add("--refresh", type=float, default=5.0, help="seconds between rewrites of --live (default 5)")


def run(args: argparse.Namespace) -> int:
    """Write or compare; returns 1 where two compared runs do not agree, else 0."""
    count, labels = len(args.runs), len(args.labels or ())
    counts = "--samples and --sample_steps should be 1 or more, and --refresh between 0.5 and 3600 seconds."
    faults = {
        f"--labels has {labels} names for {count} runs; give one for each run.": labels not in (0, count),
        f"--compare takes two runs, and {count} are given; give A and B.": args.compare and count != 2,
        "--compare and --live do different things; give one of them.": args.compare and args.live,
        counts: min(args.samples, args.sample_steps) < 1 or not 0.5 <= args.refresh <= 3600,
    }
    refuse(faults)
    if args.compare:
        return _compare(args)
    if args.live:
        _follow(args)
    else:
        print(_write(args))
    return 0


def _read(args: argparse.Namespace, begun: bool = True) -> list:
    labels = run_labels(args.runs, args.labels)
    return [read_run(*run, args.samples, args.sample_steps, begun) for run in zip(args.runs, labels, strict=True)]


def _write(args: argparse.Namespace, live: bool = False) -> Path:
    """Write the page; live: it reloads itself, and runs may have no metrics yet."""
    output = args.output or run_folder(args.runs[0]) / FILE
    page = render(_read(args, begun=not live), args.refresh if live else None)
    with atomic_file(output, durable=not live) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return output


def _compare(args: argparse.Namespace) -> int:
    a, b = _read(args)
    found = compare(a.rows, b.rows)
    print(f"A: {a.folder}\nB: {b.folder}\n{found}")
    if args.output:
        print(_write(args))
    return 0 if found.holds else 1


def _follow(args: argparse.Namespace) -> None:
    """Rewrite the page until Ctrl-C, then write it once more without reloading."""
    for path in args.runs:
        if not run_folder(path).is_dir():
            raise UserError(f"{path}: there is no such folder; give the output folder of a run.")
    try:
        print(f"{_write(args, live=True)} (rewritten every {args.refresh:g} s; Ctrl-C ends it)", flush=True)
        while True:
            sleep(args.refresh)
            _write(args, live=True)
    except KeyboardInterrupt:
        _write(args)
