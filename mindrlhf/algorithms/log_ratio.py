"""Ratios of probabilities in compiled graphs: the one place where two log-probs are subtracted."""

from mindspore import ops

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside any use, and its square is still finite in float32


def masked_log_ratio(log_probs, other_log_probs, mask):
    """log(p / q) per token, clamped to +-20, 0 on padding.

    log_probs, other_log_probs: float32[B, T]; whatever stands on padding (NaN and inf too) reaches neither the value
    nor the gradient, because `where` selects before anything is multiplied.
    mask: float32[B, T], 1 on response tokens. Returns float32[B, T]; the gradient is 0 where the clamp acts.
    """
    difference = ops.where(mask > 0, log_probs - other_log_probs, 0.0)
    return ops.clamp(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def as_float(condition, mask):
    """float32[B, T]: 1 where a token of the response meets the condition."""
    return ops.where(condition, mask, 0.0)


def sequence_log_ratio(log_probs, log_ratio, mask):
    """GSPO-token: the row's mean log-ratio as value of every token, each token's own log-prob as gradient.

    The clamp bounds what a token adds to the mean, but does not take its gradient away.
    """
    lengths = ops.clamp(mask.sum(-1, keepdims=True), 1.0)
    mean = (log_ratio * mask).sum(-1, keepdims=True) / lengths
    own = ops.where(mask > 0, log_probs, 0.0)
    # The bracket is exactly 0.
    return ops.stop_gradient(mean) + (own - ops.stop_gradient(own))


def ratio_of(log_probs, log_ratio, mask, level):
    """p/q per token (`level` "token") or the length-normalised one of the row (`level` "sequence"), float32[B, T]."""
    if level == "sequence":
        return ops.exp(sequence_log_ratio(log_probs, log_ratio, mask))
    return ops.exp(log_ratio)
