"""Importance weights for rollouts drawn from another distribution than the trained one.

The engine's log-probs differ from the train graph's by its sampling settings, its kernels or its age. The weight
p_train / p_rollout, times the loss, corrects for that in expectation; bounding it trades bias for variance.
"""

from collections.abc import Callable
from typing import Literal


def importance_weights(
    *, level: Literal["token", "sequence"], mode: Literal["truncate", "mask"], upper: float, lower: float
) -> Callable:
    """Make the function that computes per-token importance weights in compiled graphs.

    The function: (log_probs, rollout_log_probs, mask) -> (weights, outside), all float32[B, T]. log_probs: of the
    policy that starts the update, without gradient. rollout_log_probs: of the distribution from which the tokens were
    drawn. weights, outside: 0 on padding; outside is 1 where a bound acts.
    level: "token", or "sequence" for the product over the row (its log clamped to +-20) at each of its tokens.
    mode: "truncate" bounds the weight to [lower, upper] (truncated importance sampling; verl's upper is 2); "mask"
        gives a token outside the bounds weight 0 (TRL's default is "sequence" and "mask" with upper 3).
    """
    from mindspore import ops

    from mindrlhf.algorithms.log_ratio import masked_log_ratio
    from mindrlhf.algorithms.mismatch import LOG_RATIO_LIMIT

    def weights_of(log_probs, rollout_log_probs, mask):
        log_weight = ops.stop_gradient(masked_log_ratio(log_probs, rollout_log_probs, mask))
        if level == "sequence":
            total = ops.clamp((log_weight * mask).sum(-1, keepdims=True), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            log_weight = total + ops.zeros_like(log_weight)
        weights = ops.exp(log_weight)
        outside = ops.logical_or(weights > upper, weights < lower)
        bounded = ops.clamp(weights, lower, upper) if mode == "truncate" else ops.where(outside, 0.0, weights)
        return ops.where(mask > 0, bounded, 0.0), ops.where(outside, mask, 0.0)

    return weights_of
