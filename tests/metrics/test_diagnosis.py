"""Each known trouble is told when it is there, not told of a run that goes well, and not told at every step."""

import math
import re

import pytest
from run_folders import metrics_row

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.metrics.diagnosis import AGAIN_AFTER, CONDITIONS, RULES, Diagnosis, diagnose

NAN = math.nan


def hints(metric: str, values) -> list[tuple[str, int]]:
    rows = [{"step": step, metric: value} for step, value in enumerate(values, start=1)]
    diagnosis = Diagnosis()
    return [(hint.rule, hint.step) for row in rows for hint in diagnosis.look(row["step"], row)]


@pytest.mark.parametrize(
    ("metric", "values", "rule", "step"),
    [
        ("group/zero_std_fraction", [0.5, 1, 1, 1, 1, 1], "no_spread", 6),
        ("actor/entropy", [2.0] * 6 + [0.1] * 5, "entropy_collapse", 11),
        ("response_length/clip_ratio", [0.1, 0.1, 0.6, 0.6, 0.6, 0.65], "truncated", 6),
        ("actor/kl_loss", [0.01] * 8 + [0.2] * 3, "kl_running_away", 10),
        ("actor/kl_loss", [0.9] * 8 + [1.15] * 3, "kl_running_away", 10),
        ("rollout_corr/log_prob_diff/mean", [1e-6, 0.06, 0.06, 0.06], "mismatch", 4),
        ("actor/skipped_updates", [0, 0, 1], "skipped", 3),
        ("actor/pg_loss", [1e-4], "loss_near_zero", 1),
    ],
)
def test_a_trouble_is_told_when_it_shows(metric, values, rule, step):
    assert hints(metric, values) == [(rule, step)]


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("group/zero_std_fraction", [1, 1, 1, 1, 0.9] * 4),
        ("group/zero_std_fraction", [1] * 4),
        ("actor/entropy", [2.0] * 6 + [0.31] * 20),  # fell, but is not low
        ("actor/entropy", [0.15] * 40),  # low, but was so
        ("actor/entropy", [2.0] * 6 + [0.1, 0.1, NAN, 0.1] * 3),
        ("response_length/clip_ratio", [0.7, 0.1] * 10),
        ("actor/kl_loss", [0.001] * 8 + [0.09] * 3),  # grew much, but is small
        ("actor/kl_loss", [0.05] * 8 + [0.4] * 3),
        ("rollout_corr/log_prob_diff/mean", [0.1, 0.0, 0.0] * 5),
        ("actor/skipped_updates", [0] * 20),
        ("actor/pg_loss", [0.5, 1e-4, 1e-4]),  # a loss that means something
        ("actor/pg_loss", [NAN]),
    ],
)
def test_what_is_no_trouble_is_not_told(metric, values):
    assert hints(metric, values) == []


def test_a_run_that_goes_well():
    rows = [{"step": step, **metrics_row(step, 200)} for step in range(1, 201)]
    assert diagnose(rows) == []


def test_told_again_after_a_while_if_it_has_stayed():
    told = hints("response_length/clip_ratio", [1.0] * (2 * AGAIN_AFTER + 10))
    assert [step for _, step in told] == [5, 5 + AGAIN_AFTER, 5 + 2 * AGAIN_AFTER]
    assert hints("actor/pg_loss", [1e-4] * 500) == [("loss_near_zero", 1)], "explained once"
    assert diagnose([{"step": 1, "actor/pg_loss": 1e-4}]) == [], "an explanation is no problem"


def test_a_step_without_the_metric_says_nothing():
    diagnosis = Diagnosis()
    assert [hint.rule for hint in diagnosis.look(1, {"actor/skipped_updates": 1.0})] == ["skipped"]
    assert diagnosis.look(AGAIN_AFTER + 1, {"actor/loss": 0.0}) == []


def test_the_settings_and_commands_that_hints_name_are_there():
    source = " ".join(rule["text"] for rule in RULES.values())
    groups = load_grpo_config(None, []).model_dump()
    named = re.findall(r"\b((?:rollout|algorithm|optimizer|rollout_correction)\.\w+)", source)
    assert len(named) > 6
    for name in named:
        group, key = name.split(".")
        assert key in groups[group], name
    from mindrlhf.cli import COMMANDS
    from mindrlhf.files.shipped import shipped_yamls

    assert set(re.findall(r"`mindrlhf ([\w-]+)`", source)) <= COMMANDS.keys()
    assert set(re.findall(r"preset:\w+", source)) <= set(shipped_yamls())
    assert RULES.keys() == CONDITIONS.keys()
