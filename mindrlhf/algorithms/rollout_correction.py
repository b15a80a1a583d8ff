"""Importance weights for rollouts drawn from another distribution than the trained one.

The engine's log-probs differ from the train graph's by its sampling settings, its kernels or its age. The weight
p_train / p_rollout, times the loss, corrects for that in expectation; bounding it trades bias for variance.
"""

from collections.abc import Callable
from typing import Literal


def importance_weights(
    *,
    level: Literal["token", "sequence"],
    mode: Literal["truncate", "mask"],
    upper: float,
    lower: float,
) -> Callable:
    """Make the function that computes per-token importance weights in compiled graphs.

    The weights multiply per-token losses before the KL term is added.
    Returns a function (log_probs, rollout_log_probs, mask) -> (weights, metrics). log_probs: float32[B, T] of the
    policy that starts the update; the weights carry no gradient to it. rollout_log_probs: float32[B, T] of the
    distribution that was really drawn from. mask: float32[B, T].
    level: "token", or "sequence" for the product over the row (its log clamped to +-20) at each of its tokens.
    mode: "truncate" bounds the weight to [lower, upper] (truncated importance sampling; verl's upper is 2); "mask"
        gives a token outside the bounds weight 0 (TRL's default is "sequence" and "mask" with upper 3).
    weights: float32[B, T]; they and the metrics are 0 on padding. Metrics, one value per token: importance_weight
    (unbounded), importance_weight_outside (1 where a bound acts), rollout_kl and rollout_k3_kl (estimates of
    KL(rollout || train) in nats).
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import masked_log_ratio
    from mindrlhf.algorithms.mismatch import LOG_RATIO_LIMIT

    def weights_of(log_probs, rollout_log_probs, mask):
        valid = mask > 0
        log_ratio = ops.stop_gradient(masked_log_ratio(log_probs, rollout_log_probs, mask))
        log_weight = log_ratio
        if level == "sequence":
            total = (log_ratio * mask).sum(-1, keepdims=True)
            log_weight = ops.clamp(total, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) + ops.zeros_like(log_ratio)
        raw = ops.exp(log_weight)
        outside = ops.logical_or(raw > upper, raw < lower)
        if mode == "truncate":
            weights = ops.clamp(raw, lower, upper)
        else:
            weights = ops.where(outside, 0.0, raw)
        metrics = {
            "importance_weight": ops.where(valid, raw, 0.0),
            "importance_weight_outside": ops.where(outside, mask, 0.0),
            "rollout_kl": -log_ratio,
            "rollout_k3_kl": ops.expm1(log_ratio) - log_ratio,
        }
        return ops.where(valid, weights, 0.0), metrics

    return weights_of
