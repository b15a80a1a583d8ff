"""Ratios of probabilities in compiled graphs; only this file subtracts log-probs."""

from mindspore import ops

from mindrlhf.algorithms.mismatch import LOG_RATIO_LIMIT


def masked_log_ratio(log_probs, other_log_probs, mask):
    """Compute log(p / q) per token, clamped to +-20, 0 on padding: float32[B, T].

    log_probs, other_log_probs: float32[B, T]; numbers on padding (NaN and inf too) affect neither value nor gradient.
    mask: float32[B, T], 1 on response tokens. The gradient is 0 where the clamp acts.
    """
    difference = ops.where(mask > 0, log_probs - other_log_probs, 0.0)
    return ops.clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def row_mean(values, mask):
    """Compute the mean over each row's response tokens: float32[B, 1]."""
    return (values * mask).sum(-1, keepdims=True) / ops.clamp(mask.sum(-1, keepdims=True), 1.0)


def ratio_of(log_probs, log_ratio, mask, level):
    """Compute p/q per token, or the row's length-normalised ratio: float32[B, T].

    log_probs: 0 on padding. level: "token", or "sequence" for GSPO-token: every token has the row's mean log-ratio as
    value, and its own log-prob as gradient.
    """
    if level == "sequence":
        # The bracket is exactly 0.
        log_ratio = ops.stop_gradient(row_mean(log_ratio, mask)) + (log_probs - ops.stop_gradient(log_probs))
    return ops.exp(log_ratio)
