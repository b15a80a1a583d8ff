"""`mindrlhf report`: runs as one HTML page, or compared by the acceptance rules."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from time import sleep

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file
from mindrlhf.metrics.compare import compare
from mindrlhf.metrics.writers import METRICS_FILE, run_folder, run_labels
from mindrlhf.report.answers import AnswerReader
from mindrlhf.report.html import Page, render
from mindrlhf.report.run import RunOutputs, read_run

FILE = "report.html"
FOLDER = "_data"  # appended to the page's name: the folder of a large report's answers


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="output folder of a run, or a folder of such folders")
    add("--output", type=Path, help=f"file to write (default: {FILE} in the first run's folder)")
    add("--labels", nargs="+", help="a name for each run (default: that of its folder)")
    add("--samples", type=int, help="answers of each step to bring along, in whole groups (default: all)")
    add("--sample_steps", type=int, help="steps to bring answers of, at most (default: all)")
    agree = "state whether two runs agree (reward within 4%%, loss within 2%%; fine-tuning: loss): exit code 0 or 1"
    add("--compare", action="store_true", help=agree)
    add("--live", "--serve", action="store_true", help="rewrite the file while the runs go on; Ctrl-C ends it")
    add("--refresh", type=float, default=5.0, help="seconds between rewrites of --live (default 5)")


def run(args: argparse.Namespace) -> int:
    """Write or compare; returns 1 if two compared runs do not agree, else 0."""
    args.runs = [run for path in args.runs for run in _runs_in(path)]
    count = len(args.runs)
    labels = len(args.labels or ())
    if labels not in (0, count):
        raise UserError(f"--labels has {labels} names for {count} runs; give one for each run.")
    if args.compare and count != 2:
        raise UserError(f"--compare takes two runs, and {count} are given; give A and B.")
    if args.compare and args.live:
        raise UserError("--compare and --live do different things; give one of them.")
    few = any(limit is not None and limit < 1 for limit in (args.samples, args.sample_steps))
    if few or not 0.5 <= args.refresh <= 3600:
        found = "--samples and --sample_steps should be 1 or more"
        raise UserError(f"{found}, and --refresh between 0.5 and 3600 seconds.")
    reader = AnswerReader(args.samples, args.sample_steps)
    if args.compare:
        return _compare(args, reader)
    if args.live:
        _follow(args, reader)
    else:
        print(_write(args, _read(args, reader)))
    return 0


def _runs_in(path: Path) -> list[Path]:
    """List a folder's own run, or else the runs below it."""
    if not path.is_dir() or (path / METRICS_FILE).is_file():
        return [path]
    return sorted(file.parent for file in path.glob(f"*/{METRICS_FILE}")) or [path]


def _read(args: argparse.Namespace, reader: AnswerReader, begun: bool = True) -> list[RunOutputs]:
    labels = run_labels(args.runs, args.labels)
    return [read_run(*run, reader, begun) for run in zip(args.runs, labels, strict=True)]


def _write(args: argparse.Namespace, runs: Sequence[RunOutputs], refresh_s: float | None = None) -> Path:
    """Write the page, and its folder if it needs one.

    refresh_s: seconds until the page reloads itself; None if it does not.
    """
    output = args.output or run_folder(args.runs[0]) / FILE
    folder = output.with_name(output.stem + FOLDER)
    write_page(render(runs, folder.name, refresh_s), output, folder, durable=refresh_s is None)
    return output


def write_page(page: Page, output: Path, folder: Path, durable: bool = True) -> None:
    """Replace an earlier page; files are written first.

    A file's name identifies its content, so an existing file is not written again.
    """
    for name, content in page.files.items():
        if not (folder / name).is_file():
            with atomic_file(folder / name, durable) as temporary:
                temporary.write_text(content, encoding="utf-8")
    with atomic_file(output, durable) as temporary:
        temporary.write_text(page.html, encoding="utf-8")
    for path in folder.glob("*.js"):
        if path.name not in page.files:
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _compare(args: argparse.Namespace, reader: AnswerReader) -> int:
    a, b = runs = _read(args, reader)
    found = compare(a.rows, b.rows)
    print(f"A: {a.folder}\nB: {b.folder}\n{found}")
    if args.output:
        print(_write(args, runs))
    return 0 if found.holds else 1


def _follow(args: argparse.Namespace, reader: AnswerReader) -> None:
    """Rewrite the page until Ctrl-C, then write it once more without reloading."""

    def write(refresh_s: float | None) -> Path:
        return _write(args, _read(args, reader, begun=refresh_s is None), refresh_s)

    for path in args.runs:
        if not run_folder(path).is_dir():
            raise UserError(f"{path}: there is no such folder; give the output folder of a run.")
    try:
        print(f"{write(args.refresh)} (rewritten every {args.refresh:g} s; Ctrl-C ends it)", flush=True)
        while True:
            sleep(args.refresh)
            write(args.refresh)
    except KeyboardInterrupt:
        write(None)
