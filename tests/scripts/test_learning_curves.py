"""scripts/learning_curves.sh: refusals, and two short runs from nothing to the figure (slow)."""

import re

import pytest
from shell_scripts import assert_refused, run_script

from mindrlhf.metrics.writers import read_metrics

SCRIPT = "learning_curves.sh"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "gsm8k"], "there is no task gsm8k here"),
        (["--presets", "grpo ppoo"], "there is no preset ppoo"),
        (["--steps", "0"], "--steps 0 is not understood"),
        (["--warm_steps", "3x"], "--seed, --steps and --warm_steps are whole numbers"),
        (["--out"], "--out  is not understood"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_done(tmp_path, arguments, message):
    assert_refused(SCRIPT, tmp_path, arguments, message)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_step_of_it_works_and_none_is_done_twice(tmp_path):
    few = ("--tasks", "countdown", "--presets", "dapo ppo", "--steps", "2", "--warm_steps", "2", "--out", "here")
    done = run_script(SCRIPT, tmp_path, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^countdown +(dapo|ppo) +([\d.]+) ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [name for name, *_ in lines] == ["dapo", "ppo"]
    for name, before, after in lines:
        rows = read_metrics(tmp_path / "here" / "countdown" / name / "metrics.jsonl")
        measured = {
            row["step"]: row["val-core/countdown/acc/mean@1"] for row in rows if any("val-core" in k for k in row)
        }
        assert measured == {0: float(before), 2: float(after)}
    figure = tmp_path / "here" / "learning_curves.png"
    assert figure.read_bytes().startswith(b"\x89PNG")
    again = run_script(SCRIPT, tmp_path, *few)
    assert again.returncode == 0
    assert "warm start" not in again.stdout
    assert " 2/2 " not in again.stdout
    assert (tmp_path / "here" / "accuracy.txt").read_text().splitlines() == again.stdout.splitlines()[-3:-1]
