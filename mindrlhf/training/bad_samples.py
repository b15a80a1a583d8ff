"""Search for the sample that made an update's loss or gradient non-finite.

Inputs and outputs of the graph are tested first. If all of them are finite, only the gradient is not: micro-batches run
again with some samples only, half as many each time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.training.batch import MicroBatch
from mindrlhf.training.passes import MicroResult
from mindrlhf.types import TrainBatch


@dataclass(frozen=True)
class BadSample:
    """Sample that makes an update non-finite.

    group: its index among the update's groups. reason: the non-finite quantity, in words.
    """

    group: int
    sample: int
    reason: str


def find_bad_samples(
    micros: Sequence[MicroBatch],
    batches: Sequence[TrainBatch],
    results: Sequence[MicroResult],
    is_finite: Callable[[TrainBatch], bool] | None,
) -> list[BadSample]:
    """Find the samples to blame; empty if no single sample is.

    is_finite: runs a batch and tests its loss and the norm of its gradients. All ranks that share the batches make the
    same calls of it. None tests inputs and outputs only.
    """
    seen = [one for group in zip(micros, batches, results, strict=True) for one in _not_finite(*group)]
    if seen or is_finite is None:
        return seen
    found = []
    for micro, batch in zip(micros, batches, strict=True):
        if is_finite(batch):
            continue
        group = _search(range(len(micro.groups)), lambda kept, batch=batch: is_finite(_only(batch, kept, 0)))
        if group is None:
            continue
        alone = _only(batch, [group], 0)
        sample = _search(range(micro.samples), lambda kept, batch=alone: is_finite(_only(batch, kept, 1)))
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
    """Find one member that alone is not finite, by halving; None without one."""
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


def _only(batch: TrainBatch, kept: Sequence[int], axis: int) -> TrainBatch:
    """Replace other groups (axis 0) or samples (1) by copies of weight 0."""
    shape = len(batch.prefix_ids), len(batch.input_ids) // len(batch.prefix_ids)
    source = list(np.indices(shape))  # group and sample of each row
    replaced = ~np.isin(source[axis], kept)
    source[axis] = np.where(replaced, kept[0], source[axis])
    prefixes = source[0][:, 0]
    rows = np.ravel_multi_index(source, shape).reshape(-1)
    places = dict.fromkeys(("prefix_ids", "prefix_lengths"), prefixes)
    places |= dict.fromkeys(("input_ids", "targets", "lengths", "mask", "weights"), rows)
    arrays = {name: getattr(batch, name)[at] for name, at in places.items()}
    arrays["weights"][replaced.reshape(-1)] = 0.0
    return TrainBatch(
        **arrays,
        fields={name: array[rows] for name, array in batch.fields.items()},
        by_position={name: (prompt[prefixes], own[rows]) for name, (prompt, own) in batch.by_position.items()},
    )
