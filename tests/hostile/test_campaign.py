"""300 corruptions and 200 odd inputs, by a seed: each command answers as promised, and loses nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_damaged_files_and_odd_inputs(tmp_path):
    program = (sys.executable, ROOT / "tests" / "hostile" / "campaign.py", "--folder", tmp_path / "hostile")
    counts = ("--seed", SEED, "--corruptions", 300, "--odd", 200)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOG_v": "3"}
    done = subprocess.run([*map(str, program), *map(str, counts)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
