"""The table of simulated ranks: peaks from MindSpore's log, alongside the plan."""

import json

import pytest

from mindrlhf.memory.simulated import Peaks, main, read_peaks
from mindrlhf.units import GIB, MIB

LOG = """\
[INFO] DEVICE(1234,7f,python):2026-11-28-19:40:49.1 [mem_manager.cc:1] Finalize] Device MOC memory size: 65536M
MindSpore Used memory size: 59392M
MindSpore memory base address: 0xffffe9dc1407
Used peak memory usage (without fragments): 23716M
Actual peak memory usage (with fragments): 26244M
"""


def test_peaks_are_those_of_the_log():
    assert read_peaks(LOG.splitlines()) == Peaks(used=23716 * MIB, actual=26244 * MIB)


def test_the_largest_of_several_peaks_counts():
    more = "[INFO] x.cc:2] f] Actual peak memory usage (with fragments): 9M"
    assert read_peaks([more, *LOG.splitlines(), more]).actual == 26244 * MIB
    assert read_peaks([more]) == Peaks(used=None, actual=9 * MIB)


def test_a_log_without_peaks():
    assert read_peaks(["", "peak memory usage", "Used memory size: 3M"]) == Peaks()


@pytest.fixture
def write(tmp_path):
    """Write what a rank leaves; without graphs it has failed."""

    def left(rank: int, graphs: int, log: str) -> None:
        figures = {
            "graphs": [{"name": "train/loss", "seconds": 1.0}] * graphs,
            "seconds": 61.4,
            "planned_bytes": 30 * GIB,
            "process_bytes": 2 * GIB,
        }
        lines = ["train/loss 1.00 s", *([json.dumps(figures)] if graphs else [])]
        (tmp_path / f"rank_{rank}.out").write_text("\n".join(lines))
        (tmp_path / f"rank_{rank}.log").write_text(log)

    return left


def test_a_row_for_each_rank(write, tmp_path, capsys):
    for rank in range(2):
        write(rank, 8, LOG)
    assert main(str(tmp_path), "2") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "rank"
    assert [row.split() for row in rows] == [
        [str(rank), "8", "61", "23.16", "GiB", "25.63", "GiB", "30.00", "GiB"] for rank in range(2)
    ]


def test_a_failed_rank_is_named_with_its_log(write, tmp_path, capsys):
    write(0, 8, LOG)
    write(1, 0, "Traceback")
    assert main(str(tmp_path), "3") == 1
    out = capsys.readouterr().out
    assert out.count("FAILED") == 2
    assert f"rank 1 failed: see {tmp_path}/rank_1.log\nrank 2 failed: see {tmp_path}/rank_2.log" in out


def test_absent_peaks_are_said(write, tmp_path, capsys):
    write(0, 8, "")
    write(1, 8, LOG)
    assert main(str(tmp_path), "2") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        "no peak in the log of rank 0 (MindSpore writes it where it simulates Ascend, with GLOG_v=1)"
    )
    assert last.endswith("; a process had 2.00 GiB itself")
