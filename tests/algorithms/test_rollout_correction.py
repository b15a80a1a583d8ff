"""Importance weights against float64 NumPy, and the mismatch figures against direct means."""

import numpy as np
import pytest

from mindrlhf.algorithms.mismatch import mismatch_figures, mismatch_sums
from mindrlhf.algorithms.rollout_correction import importance_weights
from mindrlhf.configs.algorithm import RolloutCorrectionSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError


def run(options, *arrays):
    """Weights and places outside the bounds as NumPy, and the gradient of the weights' sum for the first array."""
    import mindspore as ms
    from mindspore import ops

    correct = importance_weights(**RolloutCorrectionSettings(**{"level": "token", **options}).model_dump())

    def forward(log_probs, rollout_log_probs, mask):
        weights, outside = correct(log_probs, rollout_log_probs, mask)
        return weights.sum() + 0.0 * ops.where(mask > 0, log_probs, 0.0).sum(), weights, outside

    gradient = ops.value_and_grad(forward, 0, None, has_aux=True)

    @ms.jit
    def step(log_probs, rollout_log_probs, mask):
        return gradient(log_probs, rollout_log_probs, mask)

    (_, weights, outside), grad = step(*(ms.Tensor(np.asarray(array, np.float32)) for array in arrays))
    return weights.asnumpy(), outside.asnumpy(), grad.asnumpy()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_and_bounds_on_1000_batches(level, mode, batches):
    arrays = [array.reshape(-1, array.shape[-1]) for array in (batches.log_probs, batches.rollout, batches.mask)]
    options = {"level": level, "mode": mode, "upper": 1.2, "lower": 0.9}
    weights, outside, grad = run(options, *arrays)
    log_probs, rollout, mask = (array.astype(np.float64) for array in arrays)
    log_ratio = np.clip(np.where(mask > 0, log_probs - rollout, 0.0), -20, 20)
    log_weight = log_ratio if level == "token" else np.clip(log_ratio.sum(-1, keepdims=True), -20, 20)
    raw = np.exp(log_weight) * np.ones(mask.shape)
    inside = (raw >= 0.9) & (raw <= 1.2)
    expected = np.where(inside, raw, np.clip(raw, 0.9, 1.2) if mode == "truncate" else 0.0) * mask
    sure = (np.abs(raw - 0.9) > 1e-5) & (np.abs(raw - 1.2) > 1e-5)
    np.testing.assert_allclose(weights[sure], expected[sure], rtol=1e-5)
    assert 0.05 < inside[mask > 0].mean() < 0.95
    assert not grad.any()
    np.testing.assert_array_equal(outside[sure], (~inside * mask)[sure])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_padding_reaches_nothing(level, garbage):
    mask = np.array([[1, 1, 0], [0, 0, 0]], np.float32)
    log_probs, rollout = np.where(mask > 0, -1.0, garbage), np.where(mask > 0, -1.1, -garbage)
    weights, outside, _ = run({"level": level}, log_probs, rollout, mask)
    expected = np.exp(0.1 if level == "token" else 0.2)
    np.testing.assert_allclose(weights, expected * mask, rtol=1e-6)
    np.testing.assert_array_equal(outside, np.zeros(mask.shape))


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"rollout_correction\.uper.*did you mean.*upper"):
        load_grpo_config(None, ["rollout_correction.uper=2.0"])
    with pytest.raises(UserError, match=r"rollout_correction\.level is 'row'.*'token', 'sequence'"):
        load_grpo_config(None, ["rollout_correction.level=row"])


def test_mismatch_figures_are_the_means_they_claim_to_be():
    rng = np.random.default_rng(10)
    train = [-rng.exponential(size=length) for length in rng.integers(0, 20, 30)]
    rollout = [row + rng.normal(scale=0.2, size=row.size) for row in train]
    sums = mismatch_sums(train[:11], rollout[:11]) + mismatch_sums(train[11:], rollout[11:])
    figures = mismatch_figures(sums)

    flat_train, flat_rollout = np.concatenate(train), np.concatenate(rollout)
    weights = np.exp(flat_train - flat_rollout)
    pairs = [(a, b) for a, b in zip(train, rollout, strict=True) if a.size]
    assert len(pairs) < len(train)
    log_ppl = np.array([[-a.mean(), -b.mean()] for a, b in pairs])
    sequence_weights = np.array([np.exp(a.sum() - b.sum()) for a, b in pairs])
    expected = {
        "training_ppl": np.exp(log_ppl[:, 0]).mean(),
        "training_log_ppl": log_ppl[:, 0].mean(),
        "rollout_ppl": np.exp(log_ppl[:, 1]).mean(),
        "rollout_log_ppl": log_ppl[:, 1].mean(),
        "log_ppl_diff": (log_ppl[:, 0] - log_ppl[:, 1]).mean(),
        "log_ppl_abs_diff": np.abs(log_ppl[:, 0] - log_ppl[:, 1]).mean(),
        "ppl_ratio": np.exp(log_ppl[:, 0] - log_ppl[:, 1]).mean(),
        "chi2_token": (weights**2).mean() - 1,
        "chi2_seq": (sequence_weights**2).mean() - 1,
        "rollout_is_mean": weights.mean(),
        "rollout_is_eff_sample_size": weights.sum() ** 2 / (weights.size * (weights**2).sum()),
    }
    assert figures == pytest.approx(expected, rel=1e-9)


def test_mismatch_of_equal_log_probs_and_of_nothing():
    rows = [np.array([-1.0, -2.0]), np.zeros(0)]
    figures = mismatch_figures(mismatch_sums(rows, rows))
    assert figures["chi2_token"] == figures["chi2_seq"] == 0.0
    assert figures["rollout_is_eff_sample_size"] == 1.0
    assert mismatch_figures(mismatch_sums([np.zeros(0)], [np.zeros(0)])) == {}
    worst = mismatch_figures(mismatch_sums([np.full(3, -500.0)], [np.full(3, -0.1)]))
    assert all(np.isfinite(value) for value in worst.values())
