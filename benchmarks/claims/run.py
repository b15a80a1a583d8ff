"""Tries what papers and suites claim, on a practice task with a small model: a table with a verdict for each claim.

python benchmarks/claims/run.py                          # all claims, 5 seeds
python benchmarks/claims/run.py clip_higher overlong     # the rows of two claims
python benchmarks/claims/run.py --list

claims.yaml holds the claims: arms as settings of `mindrlhf train`, a metric and a window of steps, the direction and
the least difference that matters. The verdict is by the 95% t-interval of the paired difference between the arms over
seeds.

Each finished run is a file in DIR/runs. What is there is not run again: stop it with Ctrl-C, and the same command goes
on. Runs use one thread each, so that the table does not depend on the number of cores. Other processors round
differently, and make another table.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from claim import read_claims
from lab import Lab
from table import made_by, markdown
from verdict import MOST_SEEDS

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_file


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="names of claims (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/claims"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="0 to N - 1 (default: 5)")
    parser.add_argument("--steps", type=int, metavar="N", help="of each run, for a trial (default: as in claims.yaml)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="arms that run at once (default: 1)")
    parser.add_argument("--list", action="store_true", help="name the claims and do nothing else")
    args = parser.parse_args(argv)
    if not 2 <= args.seeds <= MOST_SEEDS:
        parser.error(f"--seeds {args.seeds}: give 2 to {MOST_SEEDS}")
    if args.processes < 1 or (args.steps is not None and args.steps < 1):
        parser.error("--processes and --steps: give 1 or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        records = read_claims()
        claims = records.chosen(args.claims)
        if args.list:
            print("\n".join(f"{claim.name:24} {claim.text} ({claim.source})" for claim in claims))
            return 0
        lab = Lab(records, args.out.resolve(), args.seeds, args.steps)
        lab.make(claims, args.processes, lambda line: print(line, flush=True))
    except UserError as error:
        print(f"claims: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("claims: stopped; the same command goes on with the next run.", file=sys.stderr)
        return 130
    text = markdown(lab, claims)
    name = "table.md" if len(claims) == len(records.claims) else f"table_{'_'.join(args.claims)}.md"[:200]
    with atomic_file(args.out / name) as temporary:
        temporary.write_text(text, encoding="utf-8")
    print(text + made_by(lab, claims))
    return 0


if __name__ == "__main__":
    sys.exit(main())
