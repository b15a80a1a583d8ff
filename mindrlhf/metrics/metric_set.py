"""Metrics as sums that are divided at the very end.

A mean is (numerator, denominator), an extreme the value, a standard deviation (count, mean, sum of squared deviations).
All merge in any grouping, so that no figure depends on how a batch was cut or spread over ranks.
"""

import math
from collections.abc import Callable
from operator import itemgetter

import numpy as np

Sums = tuple[float, ...]


def _add(a: Sums, b: Sums) -> Sums:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _divide(sums: Sums) -> float | None:
    numerator, denominator = sums
    if denominator:
        return numerator / denominator
    return None if numerator == 0 else math.copysign(math.inf, numerator)


def _merge_deviations(a: Sums, b: Sums) -> Sums:
    """Merge sums of squared deviations (Chan, Golub and LeVeque 1979)."""
    count_a, mean_a, squares_a = a
    count_b, mean_b, squares_b = b
    count = count_a + count_b
    shift = mean_b - mean_a
    return count, mean_a + shift * count_b / count, squares_a + squares_b + shift * shift * count_a * count_b / count


def _deviation(sums: Sums) -> float | None:
    count, _, squares = sums
    return math.sqrt(squares / (count - 1)) if count > 1 else None


# Kind -> (merges two sums, value of sums or None where nothing was counted).
# np.maximum and np.minimum propagate NaN from either side; Python's max and min do so from one side only.
_KINDS: dict[str, tuple[Callable[[Sums, Sums], Sums], Callable[[Sums], float | None]]] = {
    "ratio": (_add, _divide),
    "total": (_add, itemgetter(0)),
    "max": (lambda a, b: tuple(np.maximum(a, b).tolist()), itemgetter(0)),
    "min": (lambda a, b: tuple(np.minimum(a, b).tolist()), itemgetter(0)),
    "std": (_merge_deviations, _deviation),
}


def _selected(array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    values = np.asarray(array, dtype=np.float64)
    return values.ravel() if mask is None else values[np.asarray(mask) != 0]


class MetricSet:
    """Named metrics of one step, not yet divided; a name keeps its kind."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, Sums]] = {}

    def _put(self, name: str, kind: str, *sums: float) -> None:
        sums = tuple(map(float, sums))
        known, before = self._entries.get(name, (kind, None))
        if known != kind:
            raise ValueError(f"metric {name} was added as {known} before and as {kind} now: give it one kind")
        self._entries[name] = (kind, sums if before is None else _KINDS[kind][0](before, sums))

    def add(self, name: str, numerator: float, denominator: float = 1.0) -> None:
        """Add to the numerator and the denominator of a mean."""
        self._put(name, "ratio", numerator, denominator)

    def add_total(self, name: str, value: float) -> None:
        """Add to a count, which is summed and never divided."""
        self._put(name, "total", value)

    def add_max(self, name: str, value: float) -> None:
        """Keep the largest value (NaN wins over all)."""
        self._put(name, "max", value)

    def add_min(self, name: str, value: float) -> None:
        """Keep the smallest value (NaN wins over all)."""
        self._put(name, "min", value)

    def add_values(self, name: str, array: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Add the elements of `array` where `mask` is not 0; others are never touched."""
        values = _selected(array, mask)
        self.add(name, values.sum(), values.size)

    def add_std(self, name: str, array: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Add elements to an unbiased standard deviation; fewer than two give none."""
        values = _selected(array, mask)
        if values.size:
            with np.errstate(invalid="ignore"):  # inf - inf: the deviation is NaN, and shown as such
                mean = values.mean()
                self._put(name, "std", values.size, mean, np.square(values - mean).sum())

    def add_summary(self, name: str, array: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Add elements to `name/mean`, `name/max` and `name/min`."""
        values = _selected(array, mask)
        self.add(f"{name}/mean", values.sum(), values.size)
        if values.size:
            self.add_max(f"{name}/max", values.max())
            self.add_min(f"{name}/min", values.min())

    def merge(self, other: "MetricSet") -> None:
        """Add all metrics of `other`; associative and commutative up to float64 rounding."""
        for name, (kind, sums) in other._entries.items():
            self._put(name, kind, *sums)

    def results(self) -> dict[str, float]:
        """Divide now: name -> value; a mean over nothing (0/0) is left out."""
        values = {name: _KINDS[kind][1](sums) for name, (kind, sums) in self._entries.items()}
        return {name: value for name, value in values.items() if value is not None}


def reduce(metrics: MetricSet, all_gather: Callable[[MetricSet], list[MetricSet]]) -> MetricSet:
    """Merge the metrics of all ranks; all_gather: this rank's metrics -> all ranks' metrics."""
    together = MetricSet()
    for one in all_gather(metrics):
        together.merge(one)
    return together
