"""Token selection for Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617, section 4).

A token's covariance is (A - mean A) * (log p - mean log p). Means and choice are over all trained tokens of an
update batch, and are computed on the host: the caller gathers rows over micro-batches and ranks, so that nothing
depends on the cut. verl chooses in each micro-batch, from the log-probs of that moment; here the log-probs are the
ones that the update starts from (old or rollout log-probs), which is the same for the first update on a batch and a
little older for later ones.
"""

from collections.abc import Sequence

import numpy as np


def token_covariances(log_probs: Sequence[np.ndarray], advantages: Sequence) -> np.ndarray:
    """float64[sum of R], rows one after the other.

    log_probs: float[R] per row. advantages: per row one number for all its tokens, or float[R].
    """
    flat_log_probs = np.concatenate([np.zeros(0), *log_probs])
    rows = [
        np.broadcast_to(np.asarray(row, np.float64), np.shape(of))
        for row, of in zip(advantages, log_probs, strict=True)
    ]
    flat_advantages = np.concatenate([np.zeros(0), *rows])
    if not flat_log_probs.size:
        return flat_log_probs
    return (flat_advantages - flat_advantages.mean()) * (flat_log_probs - flat_log_probs.mean())


def _rows(chosen: np.ndarray, log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Convert positions in the flat batch to float32[R] per row, 1 there."""
    flat = np.zeros(sum(len(row) for row in log_probs), np.float32)
    flat[chosen] = 1.0
    return np.split(flat, np.cumsum([len(row) for row in log_probs])[:-1])


def select_clip_cov(
    log_probs: Sequence[np.ndarray],
    advantages: Sequence,
    seed: int,
    *,
    ratio: float,
    low: float,
    high: float,
) -> list[np.ndarray]:
    """Choose random tokens among those with a covariance between two bounds.

    ratio: number of tokens as a part of all tokens; at least one. low, high: the bounds, exclusive.
    seed: fixes the choice; give each update its own. Returns float32[R] per row, 1 on chosen tokens.
    """
    covariances = token_covariances(log_probs, advantages)
    candidates = np.flatnonzero((covariances > low) & (covariances < high))
    count = max(int(ratio * covariances.size), 1)
    return _rows(np.random.default_rng(seed).permutation(candidates)[:count], log_probs)


def select_kl_cov(
    log_probs: Sequence[np.ndarray], advantages: Sequence, seed: int, *, ratio: float
) -> list[np.ndarray]:
    """Choose the tokens of highest covariance, the first of equal ones.

    ratio: number of tokens as a part of all tokens; at least one. seed: not used, nothing is drawn.
    Returns float32[R] per row, 1 on chosen tokens.
    """
    covariances = token_covariances(log_probs, advantages)
    count = max(int(ratio * covariances.size), 1)
    return _rows(np.argsort(-covariances, kind="stable")[:count], log_probs)
