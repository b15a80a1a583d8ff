"""Tests of weights for NaN, infinity and absurd numbers."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

LARGEST_WEIGHT = 1e6  # trained weights are some hundreds at most, and float16 ends at 65504


def all_finite(array: np.ndarray) -> bool:
    """Test that a float32 array has no NaN or infinity, without a copy."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = array.sum()  # NaN and infinity survive a sum; a sum may also overflow by itself
    return bool(np.isfinite(total)) or bool(np.isfinite(array).all())


def fault_of(weights: np.ndarray) -> str | None:
    """Describe what no trained weights hold: NaN, infinity, or numbers beyond LARGEST_WEIGHT.

    weights: float32. The sum of squares bounds each number, in one pass without a copy.
    """
    flat = weights.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        if np.dot(flat, flat) <= LARGEST_WEIGHT**2:
            return None
        if not all_finite(flat):
            return "NaN or infinity"
    largest = max(flat.max(), -flat.min())
    return f"the number {largest:.3g}" if largest > LARGEST_WEIGHT else None


def first_not_finite(
    arrays: Mapping[str, np.ndarray], names: Iterable[str], reduce_max: Callable[[np.ndarray], np.ndarray]
) -> str | None:
    """Name the first parameter that is not finite on any rank, or None.

    arrays: name -> this rank's part. names: of the whole model's parameters, in order. reduce_max: elementwise maximum
    over all ranks.
    """
    names = list(names)
    own = (place for place, name in enumerate(names) if name in arrays and not all_finite(arrays[name]))
    first = -int(reduce_max(np.array([-next(own, len(names))]))[0])
    return names[first] if first < len(names) else None


def spoiled(what: str, name: str) -> str:
    """Explain that non-finite weights of an owner are not written."""
    return (
        f"the {what}'s parameter {name} holds NaN or infinity, so nothing is written over what was saved before; lower "
        "optimizer.lr, and look at the gradient norms of the last steps"
    )
