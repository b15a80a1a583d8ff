"""Each call that writes fails in turn: a run ends in a sentence, loses no finished step, and resumes bit by bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    made = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", HERE / "faults.c", "-o", made, "-ldl"], check=True)
    return made


def sweep(program: str, library: Path, folder: Path, *counts: object) -> dict[str, int]:
    """The last line of a program that finds no failure."""
    command = [sys.executable, HERE / program, "--library", library, "--folder", folder, *counts]
    own = {"LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    done = subprocess.run(list(map(str, command)), env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    print(done.stdout)
    return json.loads(done.stdout.splitlines()[-1])


def test_some_calls_of_the_savers_fail(library, tmp_path):
    counts = ("--every", 100, "--first", 14, "--variants", "full")
    assert sweep("fault_savers.py", library, tmp_path / "savers", *counts)["cases"] >= 8


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_call_of_the_savers_fails(library, tmp_path):
    assert sweep("fault_savers.py", library, tmp_path / "savers")["cases"] > 1000


@pytest.mark.slow
@pytest.mark.timeout(14400)
def test_a_hundred_signals_and_fifty_pairs_of_runs(tmp_path):
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    command = [sys.executable, str(HERE / "interrupted_runs.py"), "--folder", str(tmp_path / "interrupted")]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(40000)
def test_every_call_of_whole_runs_fails(library, tmp_path):
    assert sweep("fault_runs.py", library, tmp_path / "runs")["runs"] > 2000
