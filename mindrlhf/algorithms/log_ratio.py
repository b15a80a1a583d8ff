"""Ratios of probabilities in compiled graphs; only this file subtracts log-probs."""

from mindspore import ops

from mindrlhf.algorithms.mismatch import LOG_RATIO_LIMIT


def masked_log_ratio(log_probs, other_log_probs, mask):
    """Compute log(p / q) per token, clamped to +-20, 0 on padding.

    log_probs, other_log_probs: float32[B, T]; whatever stands on padding (NaN and inf too) reaches neither the value
    nor the gradient, because `where` selects before anything is multiplied.
    mask: float32[B, T], 1 on response tokens. Returns float32[B, T]; the gradient is 0 where the clamp acts.
    """
    difference = ops.where(mask > 0, log_probs - other_log_probs, 0.0)
    return ops.clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def as_float(condition, mask):
    """Convert a condition on response tokens to float32[B, T] of 0 and 1."""
    return ops.where(condition, mask, 0.0)


def sequence_log_ratio(log_probs, log_ratio, mask):
    """Compute the sequence log-ratio of GSPO-token.

    Every token has the row's mean log-ratio as value, and its own log-prob as gradient. The clamp bounds the part
    of a token in the mean, but does not take its gradient away.
    """
    lengths = ops.clamp(mask.sum(-1, keepdims=True), 1.0)
    mean = (log_ratio * mask).sum(-1, keepdims=True) / lengths
    own = ops.where(mask > 0, log_probs, 0.0)
    # The bracket is exactly 0.
    return ops.stop_gradient(mean) + (own - ops.stop_gradient(own))


def ratio_of(log_probs, log_ratio, mask, level):
    """Compute p/q per token, or the row's length-normalised ratio: float32[B, T].

    level: "token" or "sequence".
    """
    if level == "sequence":
        return ops.exp(sequence_log_ratio(log_probs, log_ratio, mask))
    return ops.exp(log_ratio)
