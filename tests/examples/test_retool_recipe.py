"""The recipe retool.yaml: its reward, and settings that lead to the format that it counts calls in."""

import pytest
from workers import ROOT

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.data.tool_formats import load_tool_format
from mindrlhf.rewards.registry import resolve

RECIPES = ROOT / "examples" / "recipes"
CALL = "<code>print(6 * 7)</code>"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (r"It is \boxed{42}.", 1.0),
        (rf"{CALL} So it is \boxed{{42}}.", 1.0),
        (r"It is \boxed{41}.", -1.0),
        (rf"{CALL}{CALL} It is \boxed{{41}}.", -0.8),
        (rf"{CALL * 7} It is \boxed{{41}}.", -0.6),
        ("<code><interpreter>42</interpreter>", -1.0),  # what it only pretends is no call
    ],
)
def test_calls_make_wrong_answers_less_wrong(said, reward):
    function = resolve(f"{RECIPES}/retool_reward.py:retool")
    assert function("What is 6 * 7?", said, {"ground_truth": "42"}) == pytest.approx(reward)


def test_each_counted_call_ends_a_turn(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_grpo_config(str(RECIPES / "retool.yaml"))
    assert load_tool_format(config.rollout.tool_format).stop_strings == ("</code>",)
    assert [function.name for function in config.reward.functions] == ["examples/recipes/retool_reward.py:retool"]
