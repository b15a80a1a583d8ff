"""scripts/lora_grid.sh: refusals, and a short grid from nothing to its table (slow)."""

import re

import pytest
from shell_scripts import assert_refused, run_script

SCRIPT = "lora_grid.sh"


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
    assert_refused(SCRIPT, tmp_path, arguments, message)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_grid_gives_its_table_and_nothing_is_done_twice(tmp_path):
    few = ("--tasks", "arithmetic", "--ranks", "0 2", "--factors", "1", "--seeds", "0 1", "--steps", "2")
    done = run_script(SCRIPT, tmp_path, *few, "--warm_steps", "2", "--out", "here")
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "here" / "table.txt").read_text().splitlines()
    assert done.stdout.splitlines()[-3:] == table
    row = r"arithmetic +(warm start|full|rank 2) +(-|0\.0002|0\.002) +[\d.]+ \+- [\d.]+  \( [\d.e-]+ [\d.e-]+ \)"
    found = [re.fullmatch(row, line).groups() for line in table]
    assert found == [("warm start", "-"), ("full", "0.0002"), ("rank 2", "0.002")]
    again = run_script(SCRIPT, tmp_path, *few, "--warm_steps", "2", "--out", "here")
    assert again.returncode == 0
    assert "rate" not in again.stdout
    assert again.stdout.splitlines()[-3:] == table
