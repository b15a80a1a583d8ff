"""Token selection for Clip-Cov and KL-Cov (Cui et al. 2025, arXiv 2505.22617, section 4).

A token's covariance is (A - mean A) * (log p - mean log p), over all trained tokens of an update batch and all ranks.
verl chooses in each micro-batch, from the current log-probs; this code uses the log-probs at the update's start.
"""

from collections.abc import Sequence

import numpy as np


def token_covariances(log_probs: Sequence[np.ndarray], advantages: Sequence) -> np.ndarray:
    """Compute the covariance of each token: float64[sum of R], rows one after the other.

    log_probs: float[R] per row. advantages: per row one number for all its tokens, or float[R].
    """
    rows = [np.broadcast_to(row, np.shape(of)) for row, of in zip(advantages, log_probs, strict=True)]
    pairs = (np.concatenate([np.zeros(0), *arrays]) for arrays in (rows, log_probs))
    return np.multiply(*(flat - flat.mean() if flat.size else flat for flat in pairs))


def _first(chosen: np.ndarray, ratio: float, log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Mark the first of the chosen positions in the flat batch: float32[R] per row."""
    lengths = [len(row) for row in log_probs]
    flat = np.zeros(sum(lengths), np.float32)
    flat[chosen[: max(int(ratio * flat.size), 1)]] = 1.0
    return np.split(flat, np.cumsum(lengths)[:-1])


def select_clip_cov(
    log_probs: Sequence[np.ndarray], advantages: Sequence, seed: int, *, ratio: float, low: float, high: float
) -> list[np.ndarray]:
    """Choose random tokens whose covariance is between two bounds.

    ratio: number of tokens as a part of all tokens; at least one. low, high: the bounds, exclusive.
    seed: fixes the choice; give each update its own. Returns float32[R] per row, 1 on chosen tokens.
    """
    covariances = token_covariances(log_probs, advantages)
    candidates = np.flatnonzero((covariances > low) & (covariances < high))
    return _first(np.random.default_rng(seed).permutation(candidates), ratio, log_probs)


def select_kl_cov(
    log_probs: Sequence[np.ndarray], advantages: Sequence, seed: int, *, ratio: float
) -> list[np.ndarray]:
    """Choose the tokens of highest covariance as `select_clip_cov` does; nothing is drawn."""
    return _first(np.argsort(-token_covariances(log_probs, advantages), kind="stable"), ratio, log_probs)
