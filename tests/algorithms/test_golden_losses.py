"""Policy losses, KL estimators and aggregation against the values and gradients of verl and TRL.

Not offered, and so not compared: verl's `k1+`/`k3+` (they raise there; ours are tested in test_kl.py), TRL's `vespo`.
TRL's `bnpo`, `dapo`, `dr_grpo` and `luspo` are the clipped loss under another aggregation. Metrics that differ by
definition: TRL's sequence-level clip ratios are means over rows, ours over tokens; verl's clip fractions of `geo_mean`
also count tokens that leave the range on the side where the clip does not act.
"""

import json

import numpy as np
import pytest

from mindrlhf.algorithms.aggregation import batch_totals, token_weights
from mindrlhf.algorithms.kl import kl_estimator
from mindrlhf.algorithms.losses import policy_loss

TOLERANCE = 2e-6
RESPONSE_LIMIT = 6  # T of the golden batch: verl's scale and TRL's max_completion_length

VERL_NAMES = {
    "vanilla": ("clip", {"dual_clip": 3.0}),
    "vanilla.clip_higher": ("clip", {"dual_clip": 3.0}),
    "gspo": ("gspo", {}),
    "cispo": ("cispo", {}),
    "sapo": ("sapo", {}),
    "geo_mean": ("geo_mean", {}),
    "gpg": ("gpg", {}),
}
VERL_METRICS = {
    "actor/pg_clipfrac": "clip_fraction",
    "actor/pg_clipfrac_lower": "dual_clip_fraction",
    "actor/ppo_kl": "policy_kl",
}
# TRL loss type -> our loss, its options, our aggregation.
TRL_NAMES = {
    "grpo": ("clip", {}, "seq-mean-token-mean"),
    "bnpo": ("clip", {}, "token-mean"),
    "dapo": ("clip", {}, "token-mean"),
    "dr_grpo": ("clip", {}, "dr_grpo"),
    "luspo": ("clip", {}, "seq-mean-token-sum"),
    "cispo": ("cispo", {"cispo_cap": "absolute", "epsilon_high": 5.0}, "token-mean"),
    "sapo": ("sapo", {}, "seq-mean-token-mean"),
}
TRL_NOT_OFFERED = {"vespo"}


@pytest.fixture(scope="module")
def golden(shared):
    return json.loads((shared / "golden" / "policy_losses.json").read_text())


@pytest.fixture(scope="module")
def batch(golden):
    return {name: np.array(value, np.float32) for name, value in golden["inputs"].items() if name != "uid"}


@pytest.fixture(scope="module")
def compiled(compile_loss):
    cache = {}

    def get(name, **options):
        key = name, tuple(sorted(options.items()))
        if key not in cache:
            cache[key] = compile_loss(policy_loss(name, options).losses)
        return cache[key]

    return get


def weights_of(mask, mode, **options):
    totals = batch_totals(mask.sum(axis=1).astype(int))
    return token_weights(mask, mode, totals, max_tokens=RESPONSE_LIMIT, **options)


def assert_same(ours, theirs):
    np.testing.assert_allclose(ours, np.asarray(theirs), rtol=0, atol=TOLERANCE)


def test_verl_policy_losses(golden, batch, compiled):
    advantages = np.array(golden["verl.advantages"]["grpo"], np.float32)
    mask = batch["mask"]
    for key, expected in golden["verl.policy_loss"].items():
        theirs, mode = key.split("|")
        name, options = VERL_NAMES[theirs]
        if name not in ("sapo", "gpg"):
            config = expected["config"]
            options = options | {"epsilon_low": config["clip_low"], "epsilon_high": config["clip_high"]}
        mode = policy_loss(name).aggregation or mode
        weights = weights_of(mask, mode, count_empty_rows=name == "geo_mean")
        loss, grad, _, metrics = compiled(name, **options)(
            batch["log_prob"], batch["old_log_prob"], advantages, mask, weights
        )
        assert_same(loss, expected["loss"])
        assert_same(grad, expected["grad"])
        for their_metric, ours in VERL_METRICS.items():
            if their_metric in expected["metrics"] and ours in metrics and not (name == "geo_mean" and "clip" in ours):
                assert_same((metrics[ours] * mask).sum() / mask.sum(), expected["metrics"][their_metric])


def test_trl_losses(golden, batch, compiled):
    kl = kl_estimator("k3")
    mask = batch["mask"]
    advantages = np.broadcast_to(np.array(golden["trl.advantages"]["group(1e-4)"], np.float32)[:, None], mask.shape)
    compared = 0
    for key, expected in golden["trl.loss"].items():
        theirs, level, beta, *extra = key.split("|")
        if theirs in TRL_NOT_OFFERED:
            continue
        compared += 1
        name, options, mode = TRL_NAMES[theirs]
        options = options | ({"importance_level": "sequence"} if level == "sequence" else {})
        options = options | ({"delta": 4.0} if extra == ["delta=4"] else {})
        old = None if extra == ["on-policy(no old)"] else batch["old_log_prob"]
        weights = weights_of(mask, mode, count_empty_rows=True)
        inputs = batch["log_prob"], old, advantages, mask, weights
        loss, grad, _, metrics = compiled(name, **options)(*inputs)
        if float(beta.removeprefix("beta=")):
            kl_loss, kl_grad, kl_values = kl_of(kl, batch["log_prob"], batch["ref_log_prob"], mask, weights)
            loss, grad = loss + 0.04 * kl_loss, grad + 0.04 * kl_grad
            assert_same((kl_values * mask).sum() / mask.sum(), expected["metrics"]["kl"])
        assert_same(loss, expected["loss"])
        assert_same(grad, expected["grad"])
        if level == "token" and "clip_ratio/region_mean" in expected["metrics"]:
            for part, ours in {
                "region": "clip_fraction",
                "low": "clip_fraction_low",
                "high": "clip_fraction_high",
            }.items():
                assert_same((metrics[ours] * mask).sum() / mask.sum(), expected["metrics"][f"clip_ratio/{part}_mean"])
    assert compared == len(golden["trl.loss"]) - 2


def kl_of(estimate, log_probs, reference_log_probs, mask, weights):
    """Weighted KL, its gradient for log_probs, and the values per token."""
    import mindspore as ms

    def forward(log_probs, reference_log_probs, mask, weights):
        values = estimate(log_probs, reference_log_probs, mask)
        return (values * weights).sum(), values

    arrays = (log_probs, reference_log_probs, mask, weights)
    (loss, values), grad = ms.value_and_grad(forward, 0, None, has_aux=True)(*map(ms.Tensor, arrays))
    return float(loss.asnumpy()), grad.asnumpy(), values.asnumpy()


def test_verl_kl_estimators(golden, batch):
    mask = batch["mask"]
    for name, expected in golden["verl.kl"].items():
        if name.endswith("+"):
            assert expected == "raises NotImplementedError"
            continue
        _, _, values = kl_of(kl_estimator(name), batch["log_prob"], batch["ref_log_prob"], mask, mask)
        assert_same(values, np.array(expected) * mask)


def test_verl_aggregation(golden, batch):
    """The matrix that was aggregated for these numbers is the log-probs."""
    mask = batch["mask"]
    for key, expected in golden["verl.agg"].items():
        mode, *given = key.split(",")
        given = dict(item.split("=") for item in given)
        totals = batch_totals(mask.sum(axis=1).astype(int))
        totals[0] = float(given.get("batch_num_tokens", totals[0]))
        weights = token_weights(mask, mode, totals, max_tokens=int(given.get("scale", RESPONSE_LIMIT)))
        assert_same(int(given.get("dp", 1)) * (weights * batch["log_prob"]).sum(), expected)
