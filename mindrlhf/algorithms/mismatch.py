"""Distance between the rollout's distribution and the trained one, over a step.

Sums are computed first, so that ranks can add them. The metrics have the names that verl prints as `rollout_corr/...`.
"""

from collections.abc import Sequence

import numpy as np

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside any use, and its square is still finite in float32

ROW_MEANS = (
    *("training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl"),
    *("log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio"),
)
SUMS = ("tokens", "rows", "weight", "weight_squared", "sequence_weight_squared", *ROW_MEANS)


def mismatch_sums(log_probs: Sequence[np.ndarray], rollout_log_probs: Sequence[np.ndarray]) -> np.ndarray:
    """Sum log-ratios over rows into float64[len(SUMS)], for `mismatch_figures`.

    log_probs, rollout_log_probs: float[R] per row, of the same tokens under the train graph and the rollout's
    distribution. Rows without tokens are ignored. Log-ratios are clamped to +-20.
    """
    sums = np.zeros(len(SUMS))
    for train, rollout in zip(log_probs, rollout_log_probs, strict=True):
        train = np.asarray(train, np.float64)
        rollout = np.asarray(rollout, np.float64)
        if train.size:
            log_ratio = _clamp(train - rollout)
            weight = np.exp(log_ratio)
            sequence_weight = np.exp(_clamp(log_ratio.sum()))
            sums[:5] += train.size, 1, weight.sum(), (weight**2).sum(), sequence_weight**2
            train_ppl, rollout_ppl = -train.mean(), -rollout.mean()
            difference = _clamp(train_ppl - rollout_ppl)
            sums[5:9] += train_ppl, np.exp(_clamp(train_ppl)), rollout_ppl, np.exp(_clamp(rollout_ppl))
            sums[9:] += train_ppl - rollout_ppl, abs(difference), np.exp(difference)
    return sums


def _clamp(log_ratio):
    return np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def mismatch_figures(sums: np.ndarray) -> dict[str, float]:
    """Compute a step's metrics from the vectors' sum over ranks; {} without tokens.

    training_*, rollout_*: perplexity and its log, means over rows; log_ppl_diff: training - rollout; ppl_ratio: mean of
    training / rollout. chi2_*: mean squared weight - 1. rollout_is_mean, rollout_is_eff_sample_size: mean of the token
    weights, and (sum w)**2 / (n * sum w**2), 1 at best.
    """
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = total["tokens"]
    rows = total["rows"]
    if not tokens:
        return {}
    return {
        **{name: total[name] / rows for name in ROW_MEANS},
        "chi2_token": total["weight_squared"] / tokens - 1.0,
        "chi2_seq": total["sequence_weight_squared"] / rows - 1.0,
        "rollout_is_mean": total["weight"] / tokens,
        "rollout_is_eff_sample_size": total["weight"] ** 2 / (tokens * total["weight_squared"]),
    }
