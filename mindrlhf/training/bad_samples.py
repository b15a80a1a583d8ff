"""Which sample made an update's loss or gradient not finite.

What went in and what came out of the graph is looked at first. Where all of that is finite, the gradient alone is not,
and micro-batches run again with everything but some samples left out, half of those that remain each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.training.batch import MicroBatch
from mindrlhf.training.passes import MicroResult
from mindrlhf.types import TrainBatch


@dataclass(frozen=True)
class Culprit:
    """One sample of an update. group: its index among the update's groups. reason: what is not finite, in words."""

    group: int
    sample: int
    reason: str


def find_culprits(
    micros: Sequence[MicroBatch],
    batches: Sequence[TrainBatch],
    results: Sequence[MicroResult],
    is_finite: Callable[[TrainBatch], bool],
) -> list[Culprit]:
    """The samples that are to blame; empty when none is by itself.

    is_finite: runs a batch and says whether its loss and the norm of its gradients are finite. All ranks that share
    the batches come to the same calls of it.
    """
    seen = [one for group in zip(micros, batches, results, strict=True) for one in _not_finite(*group)]
    if seen:
        return seen
    found = []
    for micro, batch in zip(micros, batches, strict=True):
        if is_finite(batch):
            continue
        group = _search(range(len(micro.groups)), lambda kept, batch=batch: is_finite(_only_groups(batch, kept)))
        if group is None:
            continue
        alone = _only_groups(batch, [group])
        sample = _search(range(micro.samples), lambda kept, batch=alone: is_finite(_only_samples(batch, kept)))
        if sample is not None:
            found.append(Culprit(micro.groups[group], sample, "its gradient"))
    return found


def _not_finite(micro: MicroBatch, batch: TrainBatch, result: MicroResult) -> list[Culprit]:
    """The samples of a micro-batch with a number that is not finite on one of their tokens."""
    arrays = {"weights": batch.weights, **batch.fields, "output": result.output, **result.metrics}
    found = []
    for row in range(len(micro.groups) * micro.samples):
        tokens = batch.mask[row] > 0
        bad = [name.replace("_", " ") for name, array in arrays.items() if not np.isfinite(array[row][tokens]).all()]
        if bad:
            group, sample = divmod(row, micro.samples)
            found.append(Culprit(micro.groups[group], sample, f"its {bad[0]}"))
    return found


def _search(members: Sequence[int], is_finite: Callable[[Sequence[int]], bool]) -> int | None:
    """One member that is not finite by itself, by halving; None when each half is finite without the other."""
    members = list(members)
    while len(members) > 1:
        half = len(members) // 2
        if not is_finite(members[:half]):
            members = members[:half]
        elif not is_finite(members[half:]):
            members = members[half:]
        else:
            return None
    return members[0] if members else None


def _only_groups(batch: TrainBatch, kept: Sequence[int]) -> TrainBatch:
    """The batch with the other groups replaced by the first of those that are kept, without weight."""
    count = len(batch.prefix_ids)
    samples = len(batch.input_ids) // count
    source = np.array([group if group in kept else kept[0] for group in range(count)])
    rows = (source[:, None] * samples + np.arange(samples)).reshape(-1)
    replaced = np.repeat([group not in kept for group in range(count)], samples)
    prefixes = replace(batch, prefix_ids=batch.prefix_ids[source], prefix_lengths=batch.prefix_lengths[source])
    return _taken(prefixes, rows, replaced)


def _only_samples(batch: TrainBatch, kept: Sequence[int]) -> TrainBatch:
    """The batch with the other samples of each group replaced by the first of those that are kept, without weight."""
    count = len(batch.prefix_ids)
    samples = len(batch.input_ids) // count
    source = np.array([sample if sample in kept else kept[0] for sample in range(samples)])
    rows = (np.arange(count)[:, None] * samples + source).reshape(-1)
    return _taken(batch, rows, np.tile([sample not in kept for sample in range(samples)], count))


def _taken(batch: TrainBatch, rows: np.ndarray, replaced: np.ndarray) -> TrainBatch:
    """The batch's completion rows in another order; those that were replaced have no weight."""
    weights = batch.weights[rows]
    weights[replaced] = 0.0
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        targets=batch.targets[rows],
        mask=batch.mask[rows],
        weights=weights,
        fields={name: array[rows] for name, array in batch.fields.items()},
    )
