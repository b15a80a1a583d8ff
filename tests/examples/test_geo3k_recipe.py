"""The recipe geo3k.yaml: its settings are understood, and its reward is verl's for the right and the wrong."""

import jobs
import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.rewards.registry import resolve

RECIPES = jobs.ROOT / "examples" / "recipes"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (r"<think>3 + 4</think> It is \boxed{7}.", 1.0),
        (r"It is \boxed{7}.", 0.9),
        ("<think>3 +\n4</think>\nIt is \\boxed{8}.\n", 0.1),
        (r"First <think>3 + 4</think> \boxed{8}", 0.0),
        (r"\boxed{8}<think>3 + 4</think>", 0.0),
    ],
)
def test_the_reward(said, reward):
    function = resolve(f"{RECIPES}/geo3k_reward.py:geo3k")
    assert function("Find x.", said, {"ground_truth": "7"}) == pytest.approx(reward)


def test_its_settings_are_understood(monkeypatch):
    monkeypatch.chdir(jobs.ROOT)
    config = load_grpo_config(str(RECIPES / "geo3k.yaml"))
    (function,) = config.reward.functions
    assert resolve(function.name)("Find x.", r"\boxed{7}", {"ground_truth": "7"}) == pytest.approx(0.9)
