"""The benchmarks of split jobs run to their ends, and say what they have measured."""

import json
import re
import subprocess
import sys

import pytest
from workers import ROOT, run_msrun

SMALL = ("--", "--hidden", "32", "--layers", "1", "--heads", "2", "--prompts", "2", "--num-generations", "2")


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize("calls", [0, 2])
def test_both_sides_of_a_split_job_are_timed(tmp_path, calls):
    made = tmp_path / "split.json"
    flags = ("--rounds", "1", "--steps", "5", "--calls", str(calls), "--latency", "0.05", "--json", str(made))
    command = [sys.executable, ROOT / "benchmarks/split.py", *flags, *SMALL, "--max-completion", "8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    made = json.loads(made.read_text())
    assert made["forecast"] == {}, "so short a job has none"
    (measured,) = made["rounds"]
    assert measured["apart"]["weights"] > 0 == measured["together"]["weights"]
    assert all(0 <= measured["apart"][f"{side} wait"] < 1 for side in ("trainers", "generators"))
    if calls:
        assert measured["together"]["step"] > measured["together"]["gen"] + 2 * 0.05
    ratio = measured["apart"]["step"] / measured["together"]["step"]
    assert float(done.stdout.split()[-1]) == pytest.approx(ratio, abs=0.006)


@pytest.mark.slow
@pytest.mark.msrun
def test_the_way_between_the_sides_is_timed():
    flags = ("--apart", "--train", "dp1", "--infer", "dp1", "--layers", "1", "--rounds", "2")
    run = run_msrun(2, [ROOT / "benchmarks/reshard.py", *flags])
    assert run.returncode == 0, run.output
    assert "85 MB between ranks" in run.logs[0]
    assert len(re.findall(r"^ +[12] ", run.logs[0], re.MULTILINE)) == 2
    assert float(re.search(r"share of one rank's copying: ([\d.]+)$", run.logs[0], re.MULTILINE)[1]) > 0
