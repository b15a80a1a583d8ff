"""Search for the sample that made an update's loss or gradient non-finite.

Inputs and outputs of the graph are tested first. Where all of them are finite, only the gradient is not,
and micro-batches run again with all but some samples left out, half of those that remain each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mindrlhf.training.batch import MicroBatch
from mindrlhf.training.passes import MicroResult
from mindrlhf.types import TrainBatch


@dataclass(frozen=True)
class BadSample:
    """Sample that spoils an update.

    group: its index among the update's groups. reason: the non-finite quantity, in words.
    """

    group: int
    sample: int
    reason: str


def find_bad_samples(
    micros: Sequence[MicroBatch],
    batches: Sequence[TrainBatch],
    results: Sequence[MicroResult],
    is_finite: Callable[[TrainBatch], bool],
) -> list[BadSample]:
    """Find the samples to blame; empty when none is by itself.

    is_finite: runs a batch and tests its loss and the norm of its gradients. All ranks that share
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
            found.append(BadSample(micro.groups[group], sample, "its gradient"))
    return found


def _not_finite(micro: MicroBatch, batch: TrainBatch, result: MicroResult) -> list[BadSample]:
    """Find the samples of a micro-batch with a non-finite number on their tokens."""
    arrays = {"weights": batch.weights, **batch.fields, "output": result.output, **result.metrics}
    found = []
    for row in range(len(micro.groups) * micro.samples):
        tokens = batch.mask[row] > 0
        bad = [name.replace("_", " ") for name, array in arrays.items() if not np.isfinite(array[row][tokens]).all()]
        if bad:
            group, sample = divmod(row, micro.samples)
            found.append(BadSample(micro.groups[group], sample, f"its {bad[0]}"))
    return found


def _search(members: Sequence[int], is_finite: Callable[[Sequence[int]], bool]) -> int | None:
    """Find one member that is not finite by itself, by halving, or None."""
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
    """Replace all other groups of a batch by the first kept one, without weight."""
    count = len(batch.prefix_ids)
    samples = len(batch.input_ids) // count
    source = np.array([group if group in kept else kept[0] for group in range(count)])
    rows = (source[:, None] * samples + np.arange(samples)).reshape(-1)
    replaced = np.repeat([group not in kept for group in range(count)], samples)
    prefixes = replace(
        batch,
        prefix_ids=batch.prefix_ids[source],
        prefix_lengths=batch.prefix_lengths[source],
        prefix_keys=None if batch.prefix_keys is None else batch.prefix_keys[source],
    )
    return _taken(prefixes, rows, replaced)


def _only_samples(batch: TrainBatch, kept: Sequence[int]) -> TrainBatch:
    """Replace other samples of each group by the first kept one, without weight."""
    count = len(batch.prefix_ids)
    samples = len(batch.input_ids) // count
    source = np.array([sample if sample in kept else kept[0] for sample in range(samples)])
    rows = (np.arange(count)[:, None] * samples + source).reshape(-1)
    return _taken(batch, rows, np.tile([sample not in kept for sample in range(samples)], count))


def _taken(batch: TrainBatch, rows: np.ndarray, replaced: np.ndarray) -> TrainBatch:
    """Reorder the batch's completion rows; replaced rows get no weight."""
    weights = batch.weights[rows]
    weights[replaced] = 0.0
    return replace(
        batch,
        input_ids=batch.input_ids[rows],
        targets=batch.targets[rows],
        lengths=batch.lengths[rows],
        mask=batch.mask[rows],
        weights=weights,
        fields={name: array[rows] for name, array in batch.fields.items()},
        input_keys=None if batch.input_keys is None else batch.input_keys[rows],
    )
