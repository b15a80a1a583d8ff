"""scripts/lora_grid.sh: refusals, and a short grid from nothing to its table (slow)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from workers import ROOT

SCRIPT = ROOT / "scripts" / "lora_grid.sh"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """The script, started in `folder`, with the `mindrlhf` of this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1100)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm8k"], "there is no task gsm8k here"),
        (["--ranks", "1 x"], "--ranks, --seeds and the steps are whole numbers"),
        (["--seeds", "-1"], "--seeds -1 is not understood"),
        (["--factors", "1 fast"], "--factors are numbers"),
        (["--steps", "0"], "--steps 0 is not understood"),
        (["--out"], "--out  is not understood"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_done(tmp_path, arguments, message):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"lora_grid.sh: {message}; give --tasks NAMES")
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_grid_gives_its_table_and_nothing_is_done_twice(tmp_path):
    few = ("--tasks", "arithmetic", "--ranks", "0 2", "--factors", "1", "--seeds", "0 1", "--steps", "2")
    done = run(tmp_path, *few, "--warm_steps", "2", "--out", "here")
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "here" / "table.txt").read_text().splitlines()
    assert done.stdout.splitlines()[-3:] == table
    row = r"arithmetic +(warm start|full|rank 2) +(-|0\.0002|0\.002) +[\d.]+ \+- [\d.]+  \( [\d.e-]+ [\d.e-]+ \)"
    found = [re.fullmatch(row, line).groups() for line in table]
    assert found == [("warm start", "-"), ("full", "0.0002"), ("rank 2", "0.002")]
    again = run(tmp_path, *few, "--warm_steps", "2", "--out", "here")
    assert again.returncode == 0
    assert "rate" not in again.stdout
    assert again.stdout.splitlines()[-3:] == table
