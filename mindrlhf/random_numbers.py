"""Counter-based random numbers, independent of batch order, slots and workers."""

import numpy as np


def _mix(x: np.ndarray) -> np.ndarray:
    """Mix bits of uint64 by the finaliser of SplitMix64 (Steele, Lea & Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def random_bits(*counters) -> np.ndarray:
    """Compute uint64 random bits, a pure function of the counters.

    counters: integers or integer arrays, broadcast together.
    """
    with np.errstate(over="ignore"):
        state = np.uint64(0)
        for counter in counters:
            counter = np.asarray(counter).astype(np.int64).astype(np.uint64)
            state = _mix((state ^ counter) + np.uint64(0x9E3779B97F4A7C15))
    return state


def fraction(*counters) -> np.ndarray:
    """Compute float32 in [0, 1 - 2^-23] from the counters, as `random_bits` does.

    Only 23 bits are used, so that u * total stays strictly below total in float32.
    """
    return ((random_bits(*counters) >> np.uint64(41)).astype(np.float64) * 2.0**-23).astype(np.float32)


def uniform(seed: int, step: int, prompt_id, sample_index, position) -> np.ndarray:
    """Compute the number that draws a token: `fraction` of five counters.

    prompt_id, sample_index, position: integers or integer arrays, broadcast together. The last token is never drawn by
    rounding.
    """
    return fraction(seed, step, prompt_id, sample_index, position)


def random_keys(*counters) -> np.ndarray:
    """Compute int32 numbers over the whole range from the counters, as `random_bits` does."""
    return (random_bits(*counters) >> np.uint64(32)).astype(np.uint32).view(np.int32)
