"""Distance between the rollout's distribution and the trained one, over a step.

Sums come first, so that ranks can add theirs; metrics follow from the sums. They carry the names that verl prints
as `rollout_corr/...`.
"""

from collections.abc import Sequence

import numpy as np

LOG_RATIO_LIMIT = 20.0  # exp(20) = 4.9e8: far outside any use, and its square is still finite in float32

SUMS = (
    "tokens",
    "rows",
    "weight",
    "weight_squared",
    "training_log_ppl",
    "rollout_log_ppl",
    "log_ppl_abs_diff",
    "training_ppl",
    "rollout_ppl",
    "ppl_ratio",
    "sequence_weight_squared",
)


def mismatch_sums(log_probs: Sequence[np.ndarray], rollout_log_probs: Sequence[np.ndarray]) -> np.ndarray:
    """Sum log-ratios over rows into float64[len(SUMS)], for `mismatch_figures`.

    Add the vectors of all ranks. log_probs, rollout_log_probs: float[R] per row, of the same tokens under the train
    graph and the rollout's distribution. Rows without tokens count nowhere. Log-ratios are clamped to +-20.
    """
    sums = np.zeros(len(SUMS))
    for train, rollout in zip(log_probs, rollout_log_probs, strict=True):
        train, rollout = np.asarray(train, np.float64), np.asarray(rollout, np.float64)
        if not train.size:
            continue
        log_ratio = np.clip(train - rollout, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        weight = np.exp(log_ratio)
        train_log_ppl, rollout_log_ppl = -train.mean(), -rollout.mean()
        difference = np.clip(train_log_ppl - rollout_log_ppl, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        sequence_weight = np.exp(np.clip(log_ratio.sum(), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        sums += (
            train.size,
            1,
            weight.sum(),
            (weight**2).sum(),
            train_log_ppl,
            rollout_log_ppl,
            abs(difference),
            np.exp(min(train_log_ppl, LOG_RATIO_LIMIT)),
            np.exp(min(rollout_log_ppl, LOG_RATIO_LIMIT)),
            np.exp(difference),
            sequence_weight**2,
        )
    return sums


def mismatch_figures(sums: np.ndarray) -> dict[str, float]:
    """Compute a step's metrics from the summed vector; {} without tokens.

    training_*, rollout_*: perplexity and its log, means over rows; log_ppl_diff: training - rollout; ppl_ratio: mean of
    training / rollout. chi2_*: mean squared weight - 1. rollout_is_mean, rollout_is_eff_sample_size: mean of the token
    weights, and (sum w)**2 / (n * sum w**2), 1 at best. The KL is in every run's metrics (`metrics.experience`).
    """
    total = dict(zip(SUMS, (float(value) for value in sums), strict=True))
    tokens, rows = total["tokens"], total["rows"]
    if not tokens:
        return {}
    return {
        "training_ppl": total["training_ppl"] / rows,
        "training_log_ppl": total["training_log_ppl"] / rows,
        "rollout_ppl": total["rollout_ppl"] / rows,
        "rollout_log_ppl": total["rollout_log_ppl"] / rows,
        "log_ppl_diff": (total["training_log_ppl"] - total["rollout_log_ppl"]) / rows,
        "log_ppl_abs_diff": total["log_ppl_abs_diff"] / rows,
        "ppl_ratio": total["ppl_ratio"] / rows,
        "chi2_token": total["weight_squared"] / tokens - 1.0,
        "chi2_seq": total["sequence_weight_squared"] / rows - 1.0,
        "rollout_is_mean": total["weight"] / tokens,
        "rollout_is_eff_sample_size": total["weight"] ** 2 / (tokens * total["weight_squared"]),
    }
