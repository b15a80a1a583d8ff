"""Peak memory of a job's ranks that MindSpore has simulated, alongside the planned one.

`python -m mindrlhf.memory.simulated FOLDER RANKS` prints the table, and ends with code 1 if a rank failed. Of each rank
there are `rank_0.out`, what `mindrlhf dry-run` printed, and `rank_0.log`, MindSpore's log. Pure Python.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindrlhf.files.text import aligned
from mindrlhf.units import GIB, MIB, size

PEAK = re.compile(r"(Used|Actual) peak memory usage \((?:without|with) fragments\): *(\d+)M\b")


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of MindSpore's memory pool.

    used: without the gaps between its pieces. actual: with them. None of a rank whose log does not have them.
    """

    used: int | None = None
    actual: int | None = None


@dataclass(frozen=True)
class RankResult:
    """Outcome of a rank.

    figures: the last line of `mindrlhf dry-run`; None if it failed.
    """

    rank: int
    log: Path
    figures: dict[str, Any] | None
    peaks: Peaks


def read_peaks(lines: Iterable[str]) -> Peaks:
    """Find the peaks in MindSpore's log; the largest of each, if it has several."""
    found: dict[str, int] = {}
    for line in lines:
        if match := PEAK.search(line):
            kind = match[1].lower()
            found[kind] = max(found.get(kind, 0), int(match[2]) * MIB)
    return Peaks(**found)


def read_rank(folder: Path, rank: int) -> RankResult:
    """Read what a rank has left in a folder."""
    log = folder / f"rank_{rank}.log"
    out = folder / f"rank_{rank}.out"
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    figures = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
    peaks = Peaks()
    if log.exists():
        with log.open(encoding="utf-8", errors="replace") as file:
            peaks = read_peaks(file)
    return RankResult(rank, log, figures, peaks)


def table(results: Sequence[RankResult]) -> str:
    """Make a row for each rank."""
    rows = [["rank", "graphs", "seconds", "used peak", "actual peak", "planned"]]
    for one in results:
        if not one.figures:
            rows.append([str(one.rank), "FAILED", *["-"] * 4])
            continue
        peaks = [size(nbytes) if nbytes is not None else "-" for nbytes in (one.peaks.used, one.peaks.actual)]
        planned = size(one.figures["planned_bytes"])
        rows.append([str(one.rank), str(len(one.figures["graphs"])), f"{one.figures['seconds']:.0f}", *peaks, planned])
    return aligned(rows)


def notes(results: Sequence[RankResult]) -> list[str]:
    """List sentences below the table: failed ranks, and ranks without a peak."""
    found = [f"rank {one.rank} failed: see {one.log}" for one in results if not one.figures]
    without = [one for one in results if one.figures and one.peaks == Peaks()]
    if without:
        most = max(one.figures["process_bytes"] for one in without)
        why = "MindSpore writes it where it simulates Ascend, with GLOG_v=1"
        names = ", ".join(str(one.rank) for one in without)
        found.append(f"no peak in the log of rank {names} ({why}); a process had {most / GIB:.2f} GiB itself")
    return found


def main(folder: str, ranks: str) -> int:
    """Print the table and its notes; returns the exit code."""
    results = [read_rank(Path(folder), rank) for rank in range(int(ranks))]
    print("\n".join([table(results), *notes(results)]))
    return 0 if all(one.figures for one in results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
