"""From groups of sequences to the padded arrays that compiled graphs take, and back.

Groups are sorted by length and cut by a token budget, and their lengths padded to multiples of a bucket, so that a
handful of shapes compile. Micro-batches of one cut have equal numbers of groups; missing ones are padded with weight 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.types import TrainBatch

Rows = Sequence[Sequence[np.ndarray]]  # per group, per sample: float[R]


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """A prompt and its responses as token ids: int32[P] and G arrays int32[R]."""

    prompt_ids: np.ndarray
    responses: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Which groups run together, and the padded sizes of their graph.

    groups: indices into the list that was cut; count: N, groups including weight-0 padding; samples: G;
    prefix_size: P, prompt tokens but the last; response_size: R.
    """

    groups: tuple[int, ...]
    count: int
    samples: int
    prefix_size: int
    response_size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, G, P, R): what decides which compiled graph runs."""
        return self.count, self.samples, self.prefix_size, self.response_size


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def cut(groups: Sequence[SequenceGroup], max_tokens: int, bucket: int, least: int = 1) -> list[MicroBatch]:
    """Cuts groups into micro-batches of at most `max_tokens` padded positions (at least one group each).

    bucket: sizes are multiples of it, in tokens. least: the fewest micro-batches, if there are as many groups.
    """

    def sizes(index: int) -> tuple[int, int]:
        group = groups[index]
        longest = max(len(response) for response in group.responses)
        return round_up(longest, bucket), round_up(max(1, len(group.prompt_ids) - 1), bucket)

    if not groups:
        return []
    samples = max(len(group.responses) for group in groups)
    order = sorted(range(len(groups)), key=lambda index: (*sizes(index), index))
    longest_response, longest_prefix = (max(sizes(index)[axis] for index in order) for axis in (0, 1))
    per_batch = max(1, max_tokens // (longest_prefix + samples * longest_response))
    batches = -(-len(groups) // per_batch)
    count = min(-(-len(groups) // batches), max(1, len(groups) // least))
    cuts = []
    for start in range(0, len(groups), count):
        members = tuple(order[start : start + count])
        response_size, prefix_size = (max(sizes(index)[axis] for index in members) for axis in (0, 1))
        cuts.append(MicroBatch(members, count, samples, prefix_size, response_size))
    return cuts


def cut_alike(
    groups: int, prompt: int, samples: int, response: int, max_tokens: int, bucket: int, least: int = 1
) -> list[MicroBatch]:
    """`cut` of groups that all have a prompt and responses of these many tokens: what a step makes at most."""
    group = SequenceGroup(np.zeros(prompt, np.int32), (np.zeros(response, np.int32),) * samples)
    return cut([group] * groups, max_tokens, bucket, least)


def spread(batch: MicroBatch, rows: Rows) -> np.ndarray:
    """Per-group, per-sample float rows [R] -> float32[N*G, R] of a micro-batch, 0 on padding."""
    out = np.zeros((batch.count * batch.samples, batch.response_size), np.float32)
    for n, index in enumerate(batch.groups):
        for g, row in enumerate(rows[index]):
            out[n * batch.samples + g, : len(row)] = row
    return out


def collect(batch: MicroBatch, array: np.ndarray, groups: Sequence[SequenceGroup], into: list) -> None:
    """The inverse of `spread`: writes into[index] = tuple of float32[R] for the groups of a micro-batch."""
    for n, index in enumerate(batch.groups):
        into[index] = tuple(
            array[n * batch.samples + g, : len(response)].copy() for g, response in enumerate(groups[index].responses)
        )


def pad(
    batch: MicroBatch,
    groups: Sequence[SequenceGroup],
    weights: Rows | None = None,
    fields: Mapping[str, Rows] | None = None,
) -> TrainBatch:
    """The arrays of one micro-batch; weights, 0 where left out, and fields are per group, per sample, float[R]."""
    rows = batch.count * batch.samples
    prefix_ids = np.zeros((batch.count, batch.prefix_size), np.int32)
    prefix_lengths = np.zeros(batch.count, np.int32)
    input_ids, targets = (np.zeros((rows, batch.response_size), np.int32) for _ in range(2))
    mask = np.zeros((rows, batch.response_size), np.float32)
    for n, index in enumerate(batch.groups):
        group = groups[index]
        length = prefix_lengths[n] = len(group.prompt_ids) - 1
        prefix_ids[n, :length] = group.prompt_ids[:-1]
        for g, response in enumerate(group.responses):
            row, size = n * batch.samples + g, len(response)
            input_ids[row, 0], input_ids[row, 1:size] = group.prompt_ids[-1], response[:-1]
            targets[row, :size], mask[row, :size] = response, 1.0

    return TrainBatch(
        prefix_ids=prefix_ids,
        prefix_lengths=prefix_lengths,
        input_ids=input_ids,
        targets=targets,
        mask=mask,
        weights=np.zeros_like(mask) if weights is None else spread(batch, weights),
        fields={name: spread(batch, rows) for name, rows in (fields or {}).items()},
    )
