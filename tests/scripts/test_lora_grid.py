"""scripts/lora_grid.sh: refusals, and a short grid from nothing to its table (slow)."""

import re
import runpy

import pytest
from shell_scripts import assert_refused, run_script
from workers import ROOT

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


def test_the_figure_has_every_row_of_the_table(tmp_path):
    table = tmp_path / "table.txt"
    table.write_text(
        "arithmetic   warm start -        0.517 +- 0.057  ( 0.58 0.45 )\n"
        "arithmetic   full       6e-05    0.971 +- 0.018  ( 0.98 0.95 )\n"
        "arithmetic   full       0.0002   0.963 +- 0.018  ( 0.96 0.94 )\n"
        "countdown    rank 8     0.002    0.560 +- 0.014  ( 0.55 0.57 )\n"
    )
    figure = runpy.run_path(str(ROOT / "scripts" / "lora_grid_figure.py"))
    tasks = figure["read"](table)
    assert tasks["arithmetic"]["full"] == [(6e-5, 0.971, 0.018), (2e-4, 0.963, 0.018)]
    assert tasks["countdown"] == {"rank 8": [(2e-3, 0.56, 0.014)]}
    first, second = figure["draw"](tasks).axes
    assert [one.get_title() for one in (first, second)] == ["arithmetic", "countdown"]
    assert first.get_legend_handles_labels()[1] == ["warm start", "full"]
    points, *_ = second.containers[0]
    assert points.get_xydata().tolist() == [[2e-3, 0.56]]


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
    assert (tmp_path / "here" / "lora_grid.png").read_bytes().startswith(b"\x89PNG")
    again = run_script(SCRIPT, tmp_path, *few, "--warm_steps", "2", "--out", "here")
    assert again.returncode == 0
    assert "rate" not in again.stdout
    assert again.stdout.splitlines()[-3:] == table
