"""The critic's loss per token, for compiled graphs (PPO's reference; Schulman et al. 2016)."""

from mindspore import ops


def clipped_value_loss(values, old_values, returns, mask, *, value_clip: float | None = 0.5):
    """Compute max((v - R)**2, (clip(v) - R)**2) / 2 per token.

    All arrays are float32[B, T]. values: of the critic now, the gradient flows through it. old_values: before the
    step's first update. returns: the targets. mask: 1 on response tokens. value_clip: how far clip(v) may be from the
    old value; None is off: (v - R)**2 / 2.
    Returns (losses, metrics), 0 on padding whatever the inputs are there, and so is the gradient. Metrics, one value
    per token: value (v), value_error ((v - R)**2), and value_clip_fraction (1 where the clip takes the gradient).
    """
    valid = mask > 0
    values = ops.where(valid, values, 0.0)
    old_values = ops.where(valid, old_values, 0.0)
    returns = ops.where(valid, returns, 0.0)
    errors = ops.square(values - returns)
    metrics = {"value": values, "value_error": errors}
    if value_clip is None:
        return 0.5 * errors, metrics
    moved = values - old_values
    # Within the bounds take the value itself: old + (value - old) differs by rounding, and would count as clipped.
    bounded = ops.where(ops.abs(moved) > value_clip, old_values + ops.clamp(moved, -value_clip, value_clip), values)
    clipped = ops.square(bounded - returns)
    metrics["value_clip_fraction"] = ops.where(clipped > errors, mask, 0.0)
    return 0.5 * ops.maximum(errors, clipped), metrics
