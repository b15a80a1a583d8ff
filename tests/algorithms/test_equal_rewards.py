"""Rewards that are equal but for rounding, and samples without a reward."""

import numpy as np
import pytest

from mindrlhf.algorithms.advantages import ADVANTAGES, RewardBatch, compute_advantages

# Equal numbers, computed in other ways.
EQUAL = np.array([0.1 + 0.2, 0.3, 0.3, 0.7 - 0.4, 0.3])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name, method in sorted(ADVANTAGES.items()) if method.compares),
        ("grpo", {"advantage_eps": 1e-18}),
        ("grpo", {"leave_one_out": True}),
        ("grpo", {"normalize_functions": True, "advantage_eps": 1e-18}),
        ("reinforce_plus_plus", {}),
    ],
)
def test_rounding_is_no_spread(name, options):
    assert len(set(EQUAL)) == 3
    given = {"rewards_by_function": [{"f": EQUAL}], "function_weights": {"f": 1.0}, "lengths": [np.full(5, 2)]}
    [got] = compute_advantages(name, RewardBatch([EQUAL], **given), **options)
    assert not np.concatenate([np.ravel(row) for row in got]).any()
    scaled = compute_advantages("grpo", RewardBatch([np.array([1e-9, 2e-9])]), advantage_eps=1e-18)
    np.testing.assert_allclose(scaled[0], [-(0.5**0.5), 0.5**0.5], rtol=1e-6)  # small numbers may differ


def test_rounding_is_no_spread_for_the_others_of_an_odd_one():
    odd = compute_advantages("grpo", RewardBatch([np.array([*EQUAL, 1.3])]), leave_one_out=True)[0]
    assert odd[-1] == pytest.approx(1.0)


def test_an_unscored_sample_is_in_no_function_s_statistics():
    """GDPO normalises each function: what others gave to a sample that one function lost counts nowhere."""
    nan = float("nan")
    functions = {"a": np.array([0.0, 1.0, 2.0, 100.0]), "b": np.array([1.0, 0.0, 1.0, nan])}
    weights = {"a": 1.0, "b": 0.5}
    lost = RewardBatch([np.array([0.5, 1.0, 2.5, nan])], rewards_by_function=[functions], function_weights=weights)
    three = {name: values[:3] for name, values in functions.items()}
    kept = RewardBatch([np.array([0.5, 1.0, 2.5])], rewards_by_function=[three], function_weights=weights)
    for options in ({}, {"leave_one_out": True}, {"advantage_std": "batch"}):
        [got], [expected] = (
            compute_advantages("grpo", one, normalize_functions=True, **options) for one in (lost, kept)
        )
        np.testing.assert_array_equal(got, [*expected, 0.0])
