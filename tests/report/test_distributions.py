"""Distributions over steps: bins of rewards and quantiles of lengths."""

import numpy as np
import pytest

from mindrlhf.report import distributions as distributions_module
from mindrlhf.report.answers import StepAnswers
from mindrlhf.report.distributions import distributions

NAN = float("nan")


def step(number: int, rewards, lengths) -> StepAnswers:
    return StepAnswers(number, (), (), np.array(rewards, float), np.array(lengths, float))


def test_few_rewards_have_a_bin_each():
    found = distributions([step(1, [0, 1, 0, NAN], [1, 2, 3, 9]), step(3, [1, 1, -0.5, 1], [5, 5, 5, 5])])
    assert found["steps"] == [1, 3]
    assert [name for name, _ in found["rewards"]] == ["-0.5", "0", "1"]
    shares = np.array([values for _, values in found["rewards"]])
    np.testing.assert_allclose(shares, [[0, 0.25], [2 / 3, 0], [1 / 3, 0.75]], atol=1e-4)
    assert dict(found["lengths"])["50%"] == [2.5, 5.0]
    assert [name for name, _ in found["lengths"]] == ["5%", "25%", "50%", "75%", "95%"]


def test_many_rewards_share_ten_bins():
    found = distributions([step(1, np.linspace(0, 1, 101), np.ones(101))])
    assert len(found["rewards"]) == 10
    assert found["rewards"][0][0] == "0 to 0.1"
    assert sum(values[0] for _, values in found["rewards"]) == pytest.approx(1, abs=1e-3)


def test_steps_are_put_together_in_a_long_run(monkeypatch):
    monkeypatch.setattr(distributions_module, "MOST_POINTS", 3)
    found = distributions([step(number, [number % 2], [number]) for number in range(1, 8)])
    assert found["steps"] == [3, 6, 7]
    assert dict(found["lengths"])["50%"] == [2.0, 5.0, 7.0]
    assert dict(found["rewards"])["1"] == pytest.approx([2 / 3, 1 / 3, 1], abs=1e-4)


def test_without_answers_or_scores_there_is_nothing_to_show():
    assert distributions([]) == {}
    assert distributions([step(1, [], [])]) == {}
    assert distributions([step(1, [NAN], [4])])["rewards"] == []
