"""Weights that aggregate per-token losses to one number: loss = sum(weights * losses).

Denominators cover the whole update batch, all micro-batches and ranks, without rows that only pad: the plain sum over
micro-batches and ranks (gradients too) is the same for any cut of the batch.
"""

import numpy as np

from mindrlhf.algorithms.methods import unknown_name

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "dr_grpo")


def batch_totals(lengths) -> np.ndarray:
    """Count tokens and rows of a batch, as denominators that ranks can sum.

    lengths: int[B], trained tokens of each row (0 for a row that is masked as a whole). Returns float64[3]: tokens,
    non-empty rows, all rows; exact in float32 up to 2**24.
    """
    lengths = np.asarray(lengths)
    return np.array([lengths.sum(), np.count_nonzero(lengths), lengths.size], np.float64)


def token_weights(
    mask: np.ndarray, mode: str, totals: np.ndarray, *, max_tokens: int | None = None, count_empty_rows: bool = False
) -> np.ndarray:
    """Compute the weight of each token's loss: float32[B, T], 0 outside the mask.

    mask: float32[B, T], 1 on trained tokens; a row holds a whole response. mode: a name of `MODES`.
    totals: float[3], `batch_totals` summed over all rows of the update batch.
    max_tokens: the constant of `seq-mean-token-sum-norm` (verl's `loss_scale_factor`) and of `dr_grpo` (TRL's
        `max_completion_length`), in tokens; T would depend on the cut.
    count_empty_rows: divide the sequence means by all rows (TRL, and `dr_grpo` always) instead of the non-empty ones
        (verl).
    Raises UserError for an unknown mode.
    """
    mask = np.asarray(mask, np.float64)
    tokens, non_empty_rows, all_rows = (float(total) for total in totals)
    rows = all_rows if count_empty_rows else non_empty_rows
    if mode not in MODES:
        raise unknown_name("aggregation", mode, MODES)
    if mode in ("seq-mean-token-sum-norm", "dr_grpo") and not max_tokens:
        raise ValueError(f"aggregation {mode} needs max_tokens, the constant it divides by")
    denominators = {
        "token-mean": tokens,  # DAPO, arXiv 2503.14476, eq. 8
        "seq-mean-token-mean": rows * np.maximum(mask.sum(axis=-1, keepdims=True), 1.0),  # GRPO, arXiv 2402.03300
        "seq-mean-token-sum": rows,
        "seq-mean-token-sum-norm": max_tokens,  # verl
        "dr_grpo": all_rows * (max_tokens or 0),  # Dr. GRPO, TRL
    }
    # A batch without a trained token has all denominators 0 and a mask of zeros: its loss is 0, not 0/0.
    return (mask / np.maximum(denominators[mode], np.finfo(np.float64).tiny)).astype(np.float32)
