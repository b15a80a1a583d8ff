import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.metrics.compare import compare


def rows(rewards, losses, throughput=()):
    made = [
        {"step": step, "critic/rewards/mean": reward, "actor/loss": loss}
        for step, (reward, loss) in enumerate(zip(rewards, losses, strict=True), start=1)
    ]
    for row, value in zip(made, throughput, strict=False):
        row["perf/throughput"] = value
    return made


def test_the_limits():
    rewards, losses = np.linspace(0.2, 0.8, 9), np.linspace(-1.0, 1.0, 9)
    a = rows(rewards, losses, [100.0] * 9)
    exact = compare(a, a)
    assert exact.holds
    assert (exact.reward.relative, exact.loss.relative, exact.throughput) == (0.0, 0.0, 1.0)
    within = compare(a, rows(rewards * 1.039, losses * 1.019, [150.0] * 4 + [1.0] * 5))
    assert within.holds
    assert within.throughput == 1.5, "the first 4 steps only"
    assert within.reward.relative == pytest.approx(0.039)
    assert not compare(a, rows(rewards * 1.041, losses)).holds
    assert not compare(a, rows(rewards, losses * 0.979)).holds
    alternating = rewards + 0.05 * (-1.0) ** np.arange(9)
    assert compare(a, rows(alternating, losses)).reward.absolute == pytest.approx(0.05), "errors do not cancel"


def test_shared_steps_only():
    a, b = rows([0.5] * 4, [1.0] * 4), rows([0.5, 0.5, 0.9, 0.9], [1.0] * 4)[:2]
    assert compare(a, b).reward.steps == 2
    assert compare(a, b).holds
    with pytest.raises(UserError, match="share no step that has critic/rewards/mean"):
        compare(a, [{"step": 9, "critic/rewards/mean": 0.5}])


def test_zero_and_nan():
    zero = rows([0.0] * 2, [0.0] * 2)
    assert compare(rows([0.5] * 2, [0.0] * 2), rows([0.5] * 2, [0.0] * 2)).holds, "a loss of 0 is usual"
    assert compare(zero, rows([0.0, 0.1], [0.0] * 2)).reward.relative == np.inf
    assert not compare(zero, rows([0.0] * 2, [0.0, np.nan])).holds


@pytest.mark.parametrize("steps", [1, 3])
def test_rewards_of_zero_decide_nothing(steps):
    """Two runs that have nothing but their failure in common are not said to agree."""
    first, second = rows([0.0] * steps, [0.01] * steps), rows([0.0] * steps, [0.01] * steps)
    found = compare(first, second)
    assert not found.holds
    assert "critic/rewards/mean: " in str(found)
    assert "0 throughout in both, which says nothing" in str(found)
    assert str(found).endswith("it stays open whether the runs agree: compare steps with a reward")
    assert str(compare(first, rows([0.0] * steps, [0.5] * steps))).endswith("the runs DIFFER")
