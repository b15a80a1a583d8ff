"""Learning rate over optimizer updates."""

import math

from mindrlhf.configs.grpo import OptimizerSettings


def learning_rate(settings: OptimizerSettings, update: int, total_updates: int) -> float:
    """Compute the rate of update 0, 1, ...: warm-up, then constant, linear or cosine.

    The warm-up is linear over `warmup_steps`, the decay ends at `min_lr`.
    The last update of `total_updates` runs one step short of min_lr, so that no update is wasted at a rate of zero.
    """
    if update < settings.warmup_steps:
        return settings.lr * (update + 1) / settings.warmup_steps
    done = (update - settings.warmup_steps) / max(1, total_updates - settings.warmup_steps)
    done = min(1.0, done)
    if settings.lr_decay == "linear":
        share = 1.0 - done
    elif settings.lr_decay == "cosine":
        share = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        return settings.lr
    return settings.min_lr + (settings.lr - settings.min_lr) * share
