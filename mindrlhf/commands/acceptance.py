"""`mindrlhf acceptance`: a device against float64 answers, from operators to a run."""

import argparse
import shutil
import sys
import time
from pathlib import Path

from mindrlhf.acceptance.checks import LEVELS, PATIENCE_S
from mindrlhf.backend import default_device, find_device
from mindrlhf.commands.train import add_device_argument
from mindrlhf.errors import UserError

FOLDER = Path("out/acceptance")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_device_argument(parser)
    parser.set_defaults(device_target=default_device())
    level = "how far to go; each level includes those before it"
    add("--level", choices=LEVELS, default="run", help=f"{level} (default: run)")
    add(
        "--ranks", type=int, default=2, help="processes of the checks that several run together; 1 for none (default 2)"
    )
    add("--output", type=Path, default=FOLDER, help=f"folder of the report and of all logs (default {FOLDER})")
    add("--only", nargs="+", default=[], metavar="WORD", help="only checks with one of these words in their names")
    waits = "seconds until the next finding of a check, or for a command that it runs"
    add(
        "--timeout_s",
        type=float,
        default=PATIENCE_S,
        help=f"{waits}; what takes longer is ended (default {PATIENCE_S:g})",
    )
    add("--inject", metavar="FAULT", help=argparse.SUPPRESS)  # tests of the kit itself


def run(args: argparse.Namespace) -> int:
    """Run the checks and write the report; returns 1 if any failed, else 0."""
    from mindrlhf.acceptance.catalogue import all_checks, matching
    from mindrlhf.acceptance.facts import machine_facts
    from mindrlhf.acceptance.kit import Kit
    from mindrlhf.acceptance.report import report_data, write_report

    if args.ranks not in (1, 2, 4, 8):
        raise UserError(f"--ranks is {args.ranks}; give 1, 2, 4 or 8.")
    device = find_device(args.device_target)
    device.check_usable()
    checks = matching(all_checks(device, args.level, args.ranks), args.only)
    folder = args.output.absolute()
    work = folder / "work"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True)
    print(f"{len(checks)} checks on {device.name}; the report goes to {folder}", flush=True)
    start = time.perf_counter()
    kit = Kit(device, args.level, args.ranks, work, args.inject, args.timeout_s, tell)
    results = kit.run(checks)
    words = " ".join(["mindrlhf", "acceptance", *sys.argv[2:]])
    data = report_data(machine_facts(device), results, time.perf_counter() - start, words)
    paths = write_report(folder, data)
    failed = [one for one in results if not one.passed]
    print(f"\n{len(results) - len(failed)} of {len(results)} checks passed in {data['seconds']:.0f} s")
    if failed:
        print(f"the first that failed: {failed[0].name}")
    print("\n".join(map(str, paths)))
    return 1 if failed else 0


def tell(result) -> None:
    """Print a line for a check, and for each failed part."""
    worst = result.worst
    error = f"{worst.part}: {worst.error:.2g} of {worst.tolerance:.2g}" if worst else "nothing was found"
    print(f"{'passed' if result.passed else 'FAILED'}  {result.name}  ({error}; {result.seconds:.1f} s)", flush=True)
    for finding in result.failed:
        note = f"  {finding.note}" if finding.note else ""
        print(f"        {finding.part}: error {finding.error:.3g}, allowed {finding.tolerance:.3g}{note}", flush=True)
