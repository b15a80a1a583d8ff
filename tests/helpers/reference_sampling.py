"""Sampling in float64 NumPy, by sorting: the independent oracle of the compiled sampler and of the engine."""

from collections.abc import Callable, Collection, Sequence

import numpy as np


def filtered(
    logits: np.ndarray,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seen: Collection[int] = (),
    banned: Collection[int] = (),
) -> np.ndarray:
    """float64[V]: the probabilities that the filters leave of one row without ties; temperature 0 is greedy."""
    scores = np.array(logits, np.float64)
    for token in seen:
        scores[token] *= repetition_penalty if scores[token] < 0 else 1 / repetition_penalty
    scores[list(banned)] = -np.inf
    if temperature == 0:
        return (scores == scores.max()).astype(np.float64)
    scores /= temperature
    kept = np.argsort(-scores)[: np.isfinite(scores).sum()]
    if top_k:
        kept = kept[:top_k]
    if top_p < 1:
        shares = np.exp(scores[kept] - scores[kept[0]])
        kept = kept[: int(np.argmax(np.cumsum(shares / shares.sum()) >= top_p)) + 1]
    kept = kept[np.exp(scores[kept] - scores[kept[0]]) >= min_p]
    out = np.zeros(len(scores))
    out[kept] = np.exp(scores[kept] - scores[kept[0]])
    return out / out.sum()


def respond(
    next_logits: Callable[[Sequence[int]], np.ndarray],
    prompt: Sequence[int],
    numbers: Sequence[float],
    *,
    stop_ids: Collection[int] = (),
    min_new_tokens: int = 0,
    **filters: float,
) -> tuple[list[int], list[float]]:
    """One response of at most `len(numbers)` tokens, and the log-prob of each under what it was drawn from.

    next_logits: token ids -> float64[V] after the last of them. numbers: one uniform number for each token.
    """
    response, log_probs = [], []
    for number in numbers:
        ids = [*prompt, *response]
        banned = stop_ids if len(response) < min_new_tokens else ()
        probabilities = filtered(next_logits(ids), **filters, seen=set(ids), banned=banned)
        token = int(np.argmax(np.cumsum(probabilities) > number))
        response.append(token)
        log_probs.append(float(np.log(probabilities[token])))
        if token in stop_ids:
            break
    return response, log_probs
