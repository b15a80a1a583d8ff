"""The benchmark of the online reshard runs, and shows what is promised of it."""

import re

import pytest
from workers import ROOT, run_msrun


@pytest.mark.slow
@pytest.mark.msrun
def test_online_is_at_least_five_times_as_fast_as_through_files():
    run = run_msrun(4, [ROOT / "benchmarks/reshard.py", "--train", "tp2pp2", "--infer", "dp2tp2", "--rounds", "5"])
    assert run.returncode == 0, run.output
    assert "82 M float32 parameters, tp2pp2 -> dp2tp2" in run.logs[0]
    assert len(re.findall(r"^ +[1-5] ", run.logs[0], re.MULTILINE)) == 5
    assert float(re.search(r"^median.* ([\d.]+)$", run.logs[0], re.MULTILINE)[1]) >= 5
