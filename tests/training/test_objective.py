"""Objectives as they run in a graph: values and gradients for the log-probs against NumPy."""

import numpy as np
import pytest
from slow_cases import few_of

from mindrlhf.algorithms.losses import POLICY_LOSSES, policy_loss
from mindrlhf.algorithms.rollout_correction import importance_weights
from mindrlhf.token_arrays import CURRENT_POLICY
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD, policy_objective, value_objective

SHAPE = (4, 7)


@pytest.fixture(scope="module")
def compute():
    """(objective, outputs, mask, *fields) -> losses, metrics, and d sum(losses) / d outputs."""
    import mindspore
    from mindspore import Tensor, nn, ops

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")

    class Sum(nn.Cell):
        def __init__(self, objective):
            super().__init__()
            self.losses = objective.losses

        def construct(self, first, second, mask, *fields):
            losses, metrics = self.losses((first, second), mask, *fields)
            return losses.sum(), losses, metrics

    def run(objective, outputs, mask, *fields):
        gradient = ops.value_and_grad(Sum(objective), (0, 1), None, has_aux=True)

        @mindspore.jit
        def graph(*tensors):
            return gradient(*tensors)

        arrays = (*outputs, mask, *fields)
        (_, losses, metrics), slopes = graph(*(Tensor(np.asarray(array, np.float32)) for array in arrays))
        return (
            losses.asnumpy(),
            {name: value.asnumpy() for name, value in metrics.items()},
            [slope.asnumpy() for slope in slopes],
        )

    return run


@pytest.fixture
def arrays():
    """By name; NaN stands where anything may: on padding, and on tokens that were not sampled."""
    rng = np.random.default_rng(0)
    mask = (np.arange(SHAPE[1]) < np.array([7, 1, 4, 0])[:, None]).astype(np.float64)
    mask[0, 2:4] = mask[2, 0] = 0.0  # tokens that were not sampled
    log_probs = -rng.exponential(size=SHAPE)

    def near(scale):
        return np.where(mask > 0, np.minimum(log_probs + rng.normal(size=SHAPE) * scale, 0), np.nan)

    return {
        "log_probs": log_probs,
        "entropy": np.where(mask > 0, rng.exponential(size=SHAPE), np.nan),
        "mask": mask,
        "advantages": rng.normal(size=SHAPE) * mask,
        "old_log_probs": near(0.4),
        "reference_log_probs": near(0.6),
        "behaviour_log_probs": near(0.3),
        "selected": mask * rng.integers(0, 2, SHAPE),
        "kl_coefficients": mask * 0.3,
    }


def run(compute, arrays, objective):
    outputs = arrays["log_probs"], arrays["entropy"]
    return compute(objective, outputs, arrays["mask"], *(arrays[name] for name in objective.fields))


def masked(arrays, values):
    return np.where(arrays["mask"] > 0, values, 0.0)


def clipped(arrays):
    """PPO's clipped loss at 0.2 and its slope, token by token."""
    ratio, advantages = np.exp(arrays["log_probs"] - arrays["old_log_probs"]), arrays["advantages"]
    bounded = np.clip(ratio, 0.8, 1.2)
    return np.maximum(-advantages * ratio, -advantages * bounded), np.where(
        -advantages * ratio >= -advantages * bounded, -advantages * ratio, 0.0
    )


def k3(arrays):
    ratio = np.exp(arrays["reference_log_probs"] - arrays["log_probs"])
    return ratio - 1 - np.log(ratio), 1 - ratio


@pytest.mark.parametrize("beta", [0.0, 0.3, None])
def test_off_policy(compute, arrays, beta):
    """beta None: it comes as a field."""
    kind = {"kl": "k3", "beta": beta} if beta != 0.0 else {}
    objective = policy_objective(policy_loss("clip"), on_policy=False, **kind)
    losses, metrics, (slope, entropy_slope) = run(compute, arrays, objective)
    (value, value_slope), (kl, kl_slope) = clipped(arrays), k3(arrays)
    weight = 0.3 if beta is None else beta
    np.testing.assert_allclose(losses, masked(arrays, value + weight * kl), rtol=0, atol=1e-5)
    np.testing.assert_allclose(slope, masked(arrays, value_slope + weight * kl_slope), rtol=0, atol=1e-5)
    np.testing.assert_allclose(metrics["pg_loss"], masked(arrays, value), rtol=0, atol=1e-5)
    now_and_old = arrays["old_log_probs"] - arrays["log_probs"]
    np.testing.assert_allclose(metrics["policy_kl"], masked(arrays, now_and_old), rtol=0, atol=1e-5)
    assert not entropy_slope.any()
    assert ("kl" in metrics) == (beta != 0.0)
    if beta != 0.0:
        np.testing.assert_allclose(metrics["kl"], masked(arrays, kl), rtol=0, atol=1e-5)


def test_on_policy_takes_its_own_log_probs_as_the_old_ones(compute, arrays):
    """The ratio is 1 and its slope the policy gradient's; old log-probs are not even asked for."""
    objective = policy_objective(policy_loss("clip"), on_policy=True)
    assert objective.fields == ("advantages",)
    losses, metrics, (slope, _) = run(compute, arrays, objective)
    np.testing.assert_array_equal(losses, np.float32(masked(arrays, -arrays["advantages"])))
    np.testing.assert_allclose(slope, masked(arrays, -arrays["advantages"]), rtol=0, atol=1e-6)
    assert (metrics["clip_fraction"] == 0).all()
    assert (metrics["policy_kl"] == 0).all()


def test_old_log_probs_that_are_the_updates_own_token_by_token(compute, arrays):
    mixed = arrays["selected"] > 0
    arrays["old_log_probs"] = np.where(mixed, CURRENT_POLICY, arrays["old_log_probs"])
    losses, _, (slope, _) = run(compute, arrays, policy_objective(policy_loss("clip"), on_policy=False))
    arrays["old_log_probs"] = np.where(mixed, arrays["log_probs"], arrays["old_log_probs"])
    value, value_slope = clipped(arrays)
    np.testing.assert_allclose(losses, masked(arrays, value), rtol=0, atol=1e-5)
    np.testing.assert_allclose(slope, masked(arrays, value_slope), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(losses[mixed], np.float32(-arrays["advantages"][mixed]))


@pytest.mark.parametrize("on_policy", [False, True])
def test_the_correction_weighs_the_policy_loss_and_not_the_kl(compute, arrays, on_policy):
    correction = importance_weights(level="token", mode="truncate", upper=1.1, lower=0.0)
    kind = {"kl": "k3", "beta": 0.3, "correction": correction}
    losses, metrics, (slope, _) = run(
        compute, arrays, policy_objective(policy_loss("clip"), on_policy=on_policy, **kind)
    )
    if on_policy:
        arrays["old_log_probs"] = arrays["log_probs"]
    raw = np.exp(arrays["old_log_probs"] - arrays["behaviour_log_probs"])
    weight = np.minimum(raw, 1.1)
    (value, value_slope), (kl, kl_slope) = clipped(arrays), k3(arrays)
    np.testing.assert_allclose(losses, masked(arrays, weight * value + 0.3 * kl), rtol=0, atol=1e-5)
    np.testing.assert_allclose(slope, masked(arrays, weight * value_slope + 0.3 * kl_slope), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(metrics["importance_weight_outside"], masked(arrays, raw > 1.1))


def test_the_entropy_bonus_is_subtracted(compute, arrays):
    objective = policy_objective(policy_loss("clip"), on_policy=True, entropy_coef=0.01)
    losses, metrics, (_, slope) = run(compute, arrays, objective)
    expected = masked(arrays, -arrays["advantages"] - 0.01 * arrays["entropy"])
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(slope, -0.01 * arrays["mask"], rtol=1e-6)
    np.testing.assert_array_equal(metrics["pg_loss"], np.float32(masked(arrays, -arrays["advantages"])))


def test_a_loss_that_selects_gets_its_tokens(compute, arrays):
    objective = policy_objective(policy_loss("kl_cov"), on_policy=False)
    assert objective.fields == ("advantages", "old_log_probs", "selected")
    losses, *_ = run(compute, arrays, objective)
    log_ratio = arrays["log_probs"] - arrays["old_log_probs"]
    expected = -arrays["advantages"] * np.exp(log_ratio) + arrays["selected"] * np.abs(log_ratio)
    np.testing.assert_allclose(losses, masked(arrays, expected), rtol=0, atol=1e-5)


SOME = ("clip", "gspo", "clip_cov")  # by token, by sequence, and one that chooses tokens


@pytest.mark.parametrize("name", few_of(SOME, [name for name in POLICY_LOSSES if name not in SOME]))
def test_a_row_is_trained_as_if_it_had_sampled_tokens_only(compute, arrays, name):
    """Every policy loss with all that may be added to it: values, metrics and gradients."""
    correction = importance_weights(level="sequence", mode="truncate", upper=1.1, lower=0.0)
    kind = {"kl": "k3", "beta": 0.3, "correction": correction, "entropy_coef": 0.1}
    objective = policy_objective(policy_loss(name), on_policy=False, **kind)
    losses, metrics, slopes = run(compute, arrays, objective)
    packed = {key: np.zeros(SHAPE) for key in arrays}
    for row, mask in enumerate(arrays["mask"] > 0):
        for key, array in arrays.items():
            packed[key][row, : mask.sum()] = array[row, mask]
    expected = run(compute, packed, objective)
    assert metrics.keys() == expected[1].keys()
    pairs = [(losses, expected[0]), *((metrics[key], expected[1][key]) for key in metrics)]
    for got, other in [*pairs, *zip(slopes, expected[2], strict=True)]:
        for row, mask in enumerate(arrays["mask"] > 0):
            np.testing.assert_allclose(got[row, mask], other[row, : mask.sum()], rtol=2e-6, atol=1e-7)
            assert not got[row, ~mask].any()


def test_supervised(compute, arrays):
    losses, metrics, (slope, _) = run(compute, arrays, NEGATIVE_LOG_LIKELIHOOD)
    np.testing.assert_allclose(losses, masked(arrays, -arrays["log_probs"]), rtol=1e-6)
    np.testing.assert_array_equal(slope, -arrays["mask"].astype(np.float32))
    assert set(metrics) == {"entropy"}


def test_values(compute, arrays):
    arrays |= {"values": arrays["old_log_probs"], "returns": arrays["reference_log_probs"]}
    losses, metrics, (slope, _) = run(compute, arrays, value_objective(0.2))
    values, old, returns = arrays["log_probs"], arrays["values"], arrays["returns"]
    moved = old + np.clip(values - old, -0.2, 0.2)
    plain, clipped_error = (values - returns) ** 2, (moved - returns) ** 2
    np.testing.assert_allclose(losses, masked(arrays, np.maximum(plain, clipped_error) / 2), rtol=1e-5, atol=1e-6)
    held = (clipped_error > plain) & (np.abs(values - old) > 0.2)
    np.testing.assert_allclose(slope, masked(arrays, np.where(held, 0.0, values - returns)), rtol=1e-5, atol=1e-6)
    assert 0 < masked(arrays, held).sum() < arrays["mask"].sum()
    np.testing.assert_array_equal(metrics["value_clip_fraction"], masked(arrays, clipped_error > plain))


@pytest.mark.parametrize(
    ("on_policy", "level"), few_of([(True, "token"), (False, "sequence")], [(False, "token"), (True, "sequence")])
)
def test_the_ratio_of_the_kl_term(compute, arrays, level, on_policy):
    """TRL's per_token_kl * coef_1, whose gradient goes through both factors; in float64."""
    plain = policy_objective(policy_loss("gpg"), on_policy=on_policy, kl="k3", beta=0.0)
    weighted = policy_objective(policy_loss("gpg"), on_policy=on_policy, kl="k3", beta=0.5, kl_ratio=level)
    _, _, (without, _) = run(compute, arrays, plain)
    _, metrics, (slope, _) = run(compute, arrays, weighted)

    def kl(log_probs):
        mask = arrays["mask"]
        difference = np.where(mask > 0, arrays["reference_log_probs"] - log_probs, 0.0)
        old = arrays["log_probs"] if on_policy else arrays["old_log_probs"]
        log_ratio = np.where(mask > 0, log_probs - old, 0.0)
        if level == "sequence":
            log_ratio = log_ratio.sum(-1, keepdims=True) / np.maximum(mask.sum(-1, keepdims=True), 1)
        return np.where(mask > 0, (np.exp(difference) - difference - 1) * np.exp(log_ratio), 0.0)

    np.testing.assert_allclose(metrics["kl"], kl(arrays["log_probs"]), rtol=0, atol=1e-5)
    expected = np.zeros(SHAPE)
    for place in np.ndindex(SHAPE):
        step = np.zeros(SHAPE)
        step[place] = 1e-6
        expected[place] = (kl(arrays["log_probs"] + step).sum() - kl(arrays["log_probs"] - step).sum()) / 2e-6
    np.testing.assert_allclose(slope - without, 0.5 * expected, rtol=0, atol=1e-5)
