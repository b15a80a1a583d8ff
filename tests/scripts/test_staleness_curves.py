"""scripts/staleness_curves.sh: refusals, and short runs of two variants from nothing to the figure (slow)."""

import re

import pytest
from shell_scripts import assert_refused, run_script

from mindrlhf.metrics.writers import read_metrics

SCRIPT = "staleness_curves.sh"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "0 x"], "--seeds and --steps are whole numbers"),
        (["--steps", "0"], "--steps 0 is not understood"),
        (["--variants", "two_behind"], "there is no variant two_behind"),
        (["--out"], "--out  is not understood"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_done(tmp_path, arguments, message):
    assert_refused(SCRIPT, tmp_path, arguments, message, "--seeds NUMBERS")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_step_of_it_works_and_none_is_done_twice(tmp_path):
    few = ("--seeds", "3", "--variants", "synchronous in_parts", "--steps", "2", "--out", "here")
    done = run_script(SCRIPT, tmp_path, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(synchronous|in_parts) +([\d.]+)$", done.stdout, re.MULTILINE)
    assert [name for name, _ in lines] == ["synchronous", "in_parts"]
    for name, accuracy in lines:
        rows = read_metrics(tmp_path / "here" / f"{name}_seed3" / "metrics.jsonl")
        measured = [row[key] for row in rows for key in row if re.fullmatch(r"val-core/\w+/acc/mean@1", key)]
        assert float(accuracy) == measured[-1]
    assert (tmp_path / "here" / "staleness_curves.png").read_bytes().startswith(b"\x89PNG")
    again = run_script(SCRIPT, tmp_path, *few)
    assert again.returncode == 0
    assert "Seed 3" not in again.stdout
