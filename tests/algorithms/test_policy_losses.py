"""Policy losses against float64 NumPy on 1,000 random batches; gradients against finite differences of the same."""

import numpy as np
import pytest
from slow_cases import few_of

from mindrlhf.algorithms.aggregation import batch_totals, token_weights
from mindrlhf.algorithms.losses import POLICY_LOSSES, policy_loss

STEP = 1e-5


# The published formulas once more, in float64. `anchor` is what stop-gradients see: the unmoved log-probs.
def log_ratios(log_probs, old, mask):
    return np.clip(np.where(mask > 0, log_probs - old, 0.0), -20.0, 20.0)


def row_mean(values, mask):
    return (values * mask).sum(-1, keepdims=True) / np.maximum(mask.sum(-1, keepdims=True), 1.0)


def ratios(log_probs, old, mask, level, anchor):
    if level == "token":
        return np.exp(log_ratios(log_probs, old, mask))
    # The clamp bounds what a token adds to the row's mean, but does not take its gradient away.
    log_ratio = log_ratios(anchor, old, mask) + np.where(mask > 0, log_probs - anchor, 0.0)
    return np.exp(np.broadcast_to(row_mean(log_ratio, mask), log_ratio.shape))


def clip(log_probs, old, advantages, mask, anchor, low=0.2, high=0.2, dual_clip=None, delta=np.inf, level="token"):
    ratio = np.minimum(ratios(log_probs, old, mask, level, anchor), delta)
    objective = np.minimum(ratio * advantages, np.clip(ratio, 1 - low, 1 + high) * advantages)
    if dual_clip is not None:
        objective = np.where(advantages < 0, np.maximum(objective, dual_clip * advantages), objective)
    return -objective


def cispo(log_probs, old, advantages, mask, anchor, floor=0.0, ceiling=3.0, level="token"):
    return (
        -np.clip(ratios(anchor, old, mask, level, anchor), floor, ceiling)
        * advantages
        * np.where(mask > 0, log_probs, 0.0)
    )


def sapo(log_probs, old, advantages, mask, anchor, level="token"):
    tau = np.where(advantages > 0, 1.0, 1.05)
    gate = 4.0 / tau / (1.0 + np.exp(-np.minimum(tau * (ratios(log_probs, old, mask, level, anchor) - 1.0), 700.0)))
    return -gate * advantages


def geo_mean(log_probs, old, advantages, mask, anchor, low=0.4, high=0.4):
    log_ratio, sign = log_ratios(log_probs, old, mask), np.sign(advantages)
    one_sided = sign * np.minimum(sign * log_ratio, sign * np.clip(log_ratio, -low, high))
    one_sided = np.where(sign == 0, log_ratio, one_sided)
    return -row_mean(advantages, mask) * np.exp(row_mean(one_sided, mask)) + 0.0 * log_probs


def gpg(log_probs, old, advantages, mask, anchor):
    return -advantages * np.where(mask > 0, log_probs, 0.0)


def clip_cov(log_probs, old, advantages, mask, anchor, selected):
    ratio = ratios(anchor, old, mask, "token", None)
    clipped = np.where(advantages > 0, ratio > 1.2, (advantages < 0) & (ratio < 0.8))
    return np.where((selected > 0) & ~clipped, 0.0, clip(log_probs, old, advantages, mask, anchor))


def kl_cov(log_probs, old, advantages, mask, anchor, selected):
    penalty = selected * np.abs(log_ratios(log_probs, old, mask))
    return -ratios(log_probs, old, mask, "token", None) * advantages + penalty


CASES = {
    "clip": ("clip", {}, clip, {}),
    "clip higher": ("clip", {"epsilon_high": 0.28}, clip, {"high": 0.28}),
    "dual clip": ("clip", {"dual_clip": 3.0}, clip, {"dual_clip": 3.0}),
    "delta": ("clip", {"delta": 1.5}, clip, {"delta": 1.5}),
    "gspo": ("gspo", {}, clip, {"low": 3e-4, "high": 4e-4, "level": "sequence"}),
    "cispo": ("cispo", {}, cispo, {}),
    "cispo floor": ("cispo", {"epsilon_low": 0.2, "epsilon_high": 0.3}, cispo, {"floor": 0.8, "ceiling": 1.3}),
    "cispo absolute": ("cispo", {"cispo_cap": "absolute", "epsilon_high": 1.5}, cispo, {"ceiling": 1.5}),
    "cispo sequence": ("cispo", {"importance_level": "sequence"}, cispo, {"level": "sequence"}),
    "sapo": ("sapo", {}, sapo, {}),
    "sapo sequence": ("sapo", {"importance_level": "sequence"}, sapo, {"level": "sequence"}),
    "geo_mean": ("geo_mean", {}, geo_mean, {}),
    "gpg": ("gpg", {}, gpg, {}),
    "clip_cov": ("clip_cov", {}, clip_cov, {}),
    "kl_cov": ("kl_cov", {}, kl_cov, {}),
}


@pytest.fixture(scope="module")
def rows(batches):
    """All rows of all batches one below the other: losses look at one row at a time. Weights are each batch's own."""
    rng = np.random.default_rng(1)
    advantages = np.zeros(batches.lengths.shape)
    for index, groups in enumerate(batches.rewards):
        normal = [np.nan_to_num((g - np.nanmean(g)) / (np.nanstd(g) + 1e-6)) for g in groups if np.isfinite(g).any()]
        filled = np.concatenate([*normal, np.zeros(8)])[:8]
        advantages[index] = filled
    shape = batches.mask.shape

    def weights(mode):
        each = [
            token_weights(mask, mode, batch_totals(lengths))
            for mask, lengths in zip(batches.mask, batches.lengths, strict=True)
        ]
        return flat(np.stack(each))

    def flat(array):
        return np.ascontiguousarray(np.broadcast_to(array, shape)).reshape(-1, shape[-1]).astype(np.float32)

    return {
        "log_probs": flat(batches.log_probs),
        "old": flat(batches.old),
        "advantages": flat(advantages[..., None]),
        "mask": flat(batches.mask),
        "selected": flat(rng.integers(0, 2, shape)) * flat(batches.mask),
        "weights": {mode: weights(mode) for mode in ("token-mean", "seq-mean-token-mean")},
    }


def finite_differences(loss_of_rows, log_probs):
    """Gradient of each row's loss for its log-probs, and where no kink lies within the step."""
    gradient, smooth = np.zeros(log_probs.shape), np.zeros(log_probs.shape, bool)
    here = loss_of_rows(log_probs)
    noise = 1e-16 * (np.abs(here) + 1.0) / STEP
    for token in range(log_probs.shape[1]):
        step = np.zeros(log_probs.shape)
        step[:, token] = STEP
        above, below = loss_of_rows(log_probs + step), loss_of_rows(log_probs - step)
        gradient[:, token] = (above - below) / (2 * STEP)
        slopes = (above - here) / STEP, (here - below) / STEP
        difference = np.abs(slopes[0] - slopes[1])
        smooth[:, token] = difference <= 1e-3 * np.maximum(*np.abs(slopes)) + 1e-5 + 10 * noise
    return gradient, smooth, noise[:, None]


def test_every_loss_is_compared():
    assert {name for name, *_ in CASES.values()} == set(POLICY_LOSSES)


@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient_equal_the_float64_formula(case, rows, compile_loss):
    name, options, formula, formula_options = CASES[case]
    loss = policy_loss(name, options)
    weights = rows["weights"][loss.aggregation or "token-mean"]
    selected = [rows["selected"]] if loss.select else []
    others = [rows["old"], rows["advantages"], rows["mask"]]
    _, grad, per_token, metrics = compile_loss(loss.losses)(rows["log_probs"], *others, *selected, weights)

    wide = {key: rows[key].astype(np.float64) for key in ("log_probs", "old", "advantages", "mask", "selected")}
    anchor = wide["log_probs"]

    def reference(log_probs):
        arguments = [wide["old"], wide["advantages"], wide["mask"], anchor]
        extra = [wide["selected"]] if selected else []
        return np.where(wide["mask"] > 0, formula(log_probs, *arguments, *extra, **formula_options), 0.0)

    # A log-prob near 60 carries 4e-6 of float32 rounding into exp.
    np.testing.assert_allclose(per_token, reference(anchor), rtol=1e-5, atol=2e-6)

    expected, smooth, noise = finite_differences(lambda moved: (reference(moved) * weights).sum(-1), anchor)
    assert smooth.mean() > 0.98
    assert np.isfinite(grad).all()
    assert (np.abs(expected) > 1e-3).mean() > 0.05  # the comparison is about something
    np.testing.assert_array_less(np.abs(grad - expected)[smooth], (1e-6 + 2e-5 * np.abs(expected) + 10 * noise)[smooth])
    assert not grad[wide["mask"] == 0].any()
    for values in metrics.values():
        assert np.isfinite(values).all()
        assert not values[wide["mask"] == 0].any()


def test_clip_metrics_count_tokens_whose_clip_acts(rows, compile_loss):
    losses = policy_loss("clip", {"epsilon_low": 0.1, "epsilon_high": 0.3, "dual_clip": 2.0}).losses
    inputs = [rows[key] for key in ("log_probs", "old", "advantages", "mask")]
    metrics = compile_loss(losses)(*inputs, rows["weights"]["token-mean"])[3]
    log_probs, old, advantages, mask = (array.astype(np.float64) for array in inputs)
    ratio = ratios(log_probs, old, mask, "token", None)
    sure = (np.abs(ratio - 0.9) > 1e-5) & (np.abs(ratio - 1.3) > 1e-5) & (np.abs(ratio - 2.0) > 1e-5)
    low, high = (advantages < 0) & (ratio < 0.9) & (mask > 0), (advantages > 0) & (ratio > 1.3) & (mask > 0)
    dual = (advantages < 0) & (ratio > 2.0) & (mask > 0)
    for name, expected in {"low": low, "high": high}.items():
        np.testing.assert_array_equal(metrics[f"clip_fraction_{name}"][sure], expected[sure])
        assert expected.any()
    np.testing.assert_array_equal(metrics["clip_fraction"][sure], (low | high)[sure])
    np.testing.assert_array_equal(metrics["dual_clip_fraction"][sure], dual[sure])
    np.testing.assert_allclose(metrics["policy_kl"], -log_ratios(log_probs, old, mask), rtol=1e-6, atol=4e-6)


GARBAGE = [np.inf, -np.inf, -1e30, 1e30]  # and what is not a number
FEW = [(name, np.nan) for name in POLICY_LOSSES] + [*zip(POLICY_LOSSES, GARBAGE, strict=False)]
REST = [(name, one) for name in POLICY_LOSSES for one in GARBAGE if (name, one) not in FEW]


@pytest.mark.parametrize(("name", "garbage"), few_of(FEW, REST))
def test_padding_reaches_nothing(name, garbage, compiled_small):
    """Whatever stands on padding, value, gradient and metrics are those of zeros there, bit by bit."""
    rng = np.random.default_rng(2)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], np.float32)
    arrays = [rng.normal(size=mask.shape) for _ in range(3)]
    selected = [mask * rng.integers(0, 2, mask.shape)] if policy_loss(name).select else []

    def outcome(padding):
        first, second, third = (np.where(mask > 0, array, padding) for array in arrays)
        return compiled_small(name)(first, -second, third, mask, *selected, mask / 7)

    expected, got = outcome(0.0), outcome(garbage)
    assert got[0] == expected[0]
    for ours, clean in zip((*got[1:3], *got[3].values()), (*expected[1:3], *expected[3].values()), strict=True):
        np.testing.assert_array_equal(ours, clean)
        assert not ours[mask == 0].any()


@pytest.fixture(scope="module")
def compiled_small(compile_loss):
    cache = {}

    def get(name):
        if name not in cache:
            cache[name] = compile_loss(policy_loss(name).losses)
        return cache[name]

    return get


@pytest.mark.parametrize("name", ["clip", "gspo", "cispo", "sapo", "geo_mean"])
def test_on_policy_gradient_is_reinforce(name, compiled_small):
    """With old = stop_gradient(log_probs) every ratio is 1, and the gradient of each method is -weight * A."""
    rng = np.random.default_rng(3)
    mask = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], np.float32)
    log_probs = -rng.exponential(size=mask.shape)
    advantages = np.repeat(rng.normal(size=(4, 1)), 3, axis=1)
    weights = token_weights(mask, "seq-mean-token-mean", batch_totals([3, 2, 1, 0]))
    _, grad, per_token, _ = compiled_small(name)(log_probs, None, advantages, mask, weights)
    np.testing.assert_allclose(grad, -weights * advantages * mask, rtol=1e-5, atol=1e-7)
    if name not in ("cispo", "sapo"):
        np.testing.assert_allclose(per_token, -advantages * mask, rtol=1e-6)


def test_gspo_is_clip_at_sequence_level(rows, compile_loss):
    inputs = [rows[key][:64] for key in ("log_probs", "old", "advantages", "mask")]
    weights = rows["weights"]["seq-mean-token-mean"][:64]
    bounds = {"epsilon_low": 0.05, "epsilon_high": 0.1}
    gspo = compile_loss(policy_loss("gspo", bounds).losses)(*inputs, weights)
    clipped = compile_loss(policy_loss("clip", bounds | {"importance_level": "sequence"}).losses)(*inputs, weights)
    np.testing.assert_array_equal(gspo[1], clipped[1])
    np.testing.assert_array_equal(gspo[2], clipped[2])
