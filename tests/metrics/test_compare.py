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


def test_a_loss_that_is_0_by_construction_is_not_judged():
    """Advantages of a group sum to 0, so one update without a KL term has rounding as its loss."""
    a = rows([0.1, 0.4, 0.7], [-1.5e-9, -3.8e-9, -1.3e-10])
    for other in ([8.5e-9, 6.2e-9, 9.9e-9], [0.0] * 3, [-2e-7, 3e-7, 0.0]):
        found = compare(a, rows([0.1, 0.4, 0.7], other))
        assert found.holds
        assert "rounding of a loss that is 0 by construction: not judged" in str(found)
        assert str(found).endswith("the runs agree")
    assert not compare(a, rows([0.1, 0.4, 0.7], [0.01] * 3)).holds, "a loss in one run only is judged"
    assert not compare(a, rows([0.1, 0.4, 0.7], [1e-9, np.nan, 0.0])).holds
    assert not compare(a, rows([0.2, 0.4, 0.7], [1e-9] * 3)).holds, "rewards decide"


def tuned(losses, seconds=None):
    times = [seconds] * len(losses) if seconds else []
    made = [{"step": step, "train/loss": loss} for step, loss in enumerate(losses, start=1)]
    for row, value in zip(made, times, strict=False):
        row["timing_s/step"] = value
    return made


def test_fine_tuning_is_compared_by_its_loss_and_time():
    losses = np.linspace(2.0, 0.5, 5)
    found = compare(tuned(losses, 2.0), tuned(losses * 1.019, 3.0))
    assert found.holds
    assert found.reward is None
    assert found.seconds == (10.0, 15.0)
    assert "train/loss: mean absolute error 1.90% of mean |A| over 5 steps (limit 2%" in str(found)
    assert "total time of the shared steps: B takes 1.500 of A (15.00 s and 10.00 s; no limit)" in str(found)
    assert not compare(tuned(losses), tuned(losses * 1.021)).holds
    assert compare(tuned(losses), tuned(losses)).seconds is None
    small = np.full(3, 1e-7)
    assert not compare(tuned(small), tuned(small * 2)).holds, "a loss of fine-tuning is never 0 by construction"
    assert str(compare(tuned([0.0]), tuned([0.0]))).endswith("compare steps with a loss")


def test_fine_tuning_and_grpo_are_not_one_job():
    with pytest.raises(UserError, match="share no step that has critic/rewards/mean"):
        compare(tuned([1.0]), rows([0.5], [1.0]))
