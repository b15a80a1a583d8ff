"""Conversion of groups of sequences to padded arrays of compiled graphs, and back.

Groups are sorted by length and cut by a token budget, and their lengths are padded to multiples of a bucket, so that
only a few shapes compile. Micro-batches of one cut have equal numbers of groups; missing ones have weight 0.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.models.expert_layers import CHOSEN
from mindrlhf.models.inputs import DROPOUT, ROUTING
from mindrlhf.models.routing import Routing, RoutingForm
from mindrlhf.models.vision.batch import PictureInputs, image_arrays
from mindrlhf.random_numbers import random_keys
from mindrlhf.shapes import padded_prefix, round_up
from mindrlhf.token_arrays import TOKEN_ARRAYS
from mindrlhf.types import TrainBatch, taken

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

Rows = Sequence[Sequence[np.ndarray]]  # per group, per sample: float[R]


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """Prompt and its responses as token ids: int32[P] and G arrays int32[R].

    sampled: G arrays bool[R], the tokens that may be trained on; the others are context. None: all tokens. identity:
    numbers that are unique among the groups of an update; they key the group's random masks.
    pictures: of the prompt, then of each response, in the order of their tokens; () without any. routing: experts that
    a decoder replays, if it does; None lets the routers choose.
    """

    prompt_ids: np.ndarray
    responses: tuple[np.ndarray, ...]
    sampled: tuple[np.ndarray, ...] | None = None
    identity: tuple[int, ...] = ()
    pictures: tuple[tuple["Picture", ...], ...] = ()
    routing: Routing | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Groups that run together, and the padded sizes of their graph.

    groups: indices into the list that was cut; count: N, groups including weight-0 padding; samples: G;
    prefix_size: P, prompt tokens without the last; response_size: R.
    """

    groups: tuple[int, ...]
    count: int
    samples: int
    prefix_size: int
    response_size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes (N, G, P, R); each combination is one compiled graph."""
        return self.count, self.samples, self.prefix_size, self.response_size

    @property
    def prompt_rows(self) -> int:
        """Padded positions of all prompts."""
        return self.count * self.prefix_size

    @property
    def response_rows(self) -> int:
        """Padded positions of all responses."""
        return self.count * self.samples * self.response_size

    @property
    def rows(self) -> int:
        """Padded positions in total."""
        return self.prompt_rows + self.response_rows


def cut(
    groups: Sequence[SequenceGroup],
    max_tokens: int,
    bucket: int,
    least: int = 1,
    largest: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[MicroBatch]:
    """Cut groups into micro-batches of at most `max_tokens` padded positions.

    Each has at least one group.
    bucket: sizes are multiples of it, in tokens. least: the fewest micro-batches, if there are enough groups. largest:
    elementwise maximum over ranks that compute micro-batches together, whose sizes are equal then; a rank that has
    fewer groups has some without any.
    """
    sizes = [_padded(map(len, group.responses), len(group.prompt_ids), bucket) for group in groups]
    samples = max((len(group.responses) for group in groups), default=0)
    return _cut(sizes, samples, max_tokens, least, largest)


@lru_cache(maxsize=16)  # a plan needs the same few cuts many times
def cut_alike(
    groups: int, prompt: int, samples: int, response: int, max_tokens: int, bucket: int, least: int = 1
) -> Sequence[MicroBatch]:
    """Cut equal groups of these lengths: the largest micro-batches of a step."""
    return _cut([_padded((response,), prompt, bucket)] * groups, samples, max_tokens, least)


def _padded(responses: Iterable[int], prompt: int, bucket: int) -> tuple[int, int]:
    """Pad the lengths of a group's longest response and its prompt, in tokens."""
    return round_up(max(responses), bucket), padded_prefix(prompt, bucket)


def _cut(
    sizes: Sequence[tuple[int, int]],
    samples: int,
    max_tokens: int,
    least: int,
    largest: Callable[[np.ndarray], np.ndarray] | None = None,
) -> list[MicroBatch]:
    """Cut groups with `sizes` (`_padded`) and at most `samples` responses."""
    order = sorted(range(len(sizes)), key=lambda index: (*sizes[index], index))
    every = [sizes[index] for index in order]
    missing = 0
    if largest:
        count, samples = largest(np.array([len(every), samples])).tolist()
        missing = count - len(every)
        every = largest(np.array([(0, 0)] * missing + every).reshape((count, 2))).tolist()
    if not every:
        return []
    longest_response, longest_prefix = (max(size[axis] for size in every) for axis in (0, 1))
    per_batch = max(1, max_tokens // (longest_prefix + samples * longest_response))
    batches = -(-len(every) // per_batch)
    count = min(-(-len(every) // batches), max(1, len(every) // least))
    cuts = []
    for start in range(0, len(every), count):
        members = tuple(order[max(0, start - missing) : max(0, start + count - missing)])
        response_size, prefix_size = (max(size[axis] for size in every[start : start + count]) for axis in (0, 1))
        cuts.append(MicroBatch(members, count, samples, prefix_size, response_size))
    return cuts


def spread(batch: MicroBatch, name: str, rows: Rows) -> np.ndarray:
    """Pad per-group, per-sample rows [R] of an array in `token_arrays` to [N*G, R]."""
    array = TOKEN_ARRAYS[name]
    out = np.full((batch.count * batch.samples, batch.response_size), array.padding, array.dtype)
    for n, index in enumerate(batch.groups):
        for g, row in enumerate(rows[index]):
            out[n * batch.samples + g, : len(row)] = row
    return out


def collect(batch: MicroBatch, array: np.ndarray, groups: Sequence[SequenceGroup], into: list) -> None:
    """Undo `spread`: write into[index] = tuple of float32[R] for each group."""
    for n, index in enumerate(batch.groups):
        into[index] = tuple(
            array[n * batch.samples + g, : len(response)].copy() for g, response in enumerate(groups[index].responses)
        )


def collect_sampled(batch: MicroBatch, array: np.ndarray, groups: Sequence[SequenceGroup], into: list) -> None:
    """Undo `spread` for sampled tokens only, in shorter rows."""
    collect(batch, array, groups, into)
    for index in batch.groups:
        if groups[index].sampled is not None:
            into[index] = tuple(taken(into[index], groups[index].sampled))


def pad(
    batch: MicroBatch,
    groups: Sequence[SequenceGroup],
    weights: Rows | None = None,
    fields: Mapping[str, Rows] | None = None,
    draw: tuple[int, ...] | None = None,
    pictures: PictureInputs | None = None,
    routing: RoutingForm | None = None,
) -> TrainBatch:
    """Build the arrays of one micro-batch.

    weights, fields: per group, per sample, [R]; weights are 0 for left-out tokens, fields are in `token_arrays`. draw:
    numbers that key the update's random masks; None without masks. pictures: of a decoder that sees. routing: of a
    decoder that replays it.
    """
    rows = batch.count * batch.samples
    prefix_ids = np.zeros((batch.count, batch.prefix_size), np.int32)
    prefix_lengths = np.zeros(batch.count, np.int32)
    input_ids, targets = (np.zeros((rows, batch.response_size), np.int32) for _ in range(2))
    lengths = np.zeros(rows, np.int32)
    mask = np.zeros((rows, batch.response_size), np.float32)
    for n, index in enumerate(batch.groups):
        group = groups[index]
        length = prefix_lengths[n] = len(group.prompt_ids) - 1
        prefix_ids[n, :length] = group.prompt_ids[:-1]
        for g, response in enumerate(group.responses):
            row = n * batch.samples + g
            size = len(response)
            input_ids[row, 0] = group.prompt_ids[-1]
            input_ids[row, 1:size] = response[:-1]
            targets[row, :size] = response
            lengths[row] = size
            mask[row, :size] = 1.0 if group.sampled is None else group.sampled[g]

    by_position = {"positions": places(batch, prefix_lengths)}
    if draw is not None:
        by_position[DROPOUT] = position_keys(batch, groups, draw)
    images: Mapping[str, np.ndarray] = {}
    if pictures is not None:
        seen, images = image_arrays([groups[index] for index in batch.groups], batch.shape, pictures)
        by_position |= seen
    if routing:
        by_position[ROUTING] = routings(batch, groups, routing)
    return TrainBatch(
        prefix_ids=prefix_ids,
        prefix_lengths=prefix_lengths,
        input_ids=input_ids,
        targets=targets,
        lengths=lengths,
        mask=mask,
        weights=np.zeros_like(mask) if weights is None else spread(batch, "weights", weights),
        fields={name: spread(batch, name, rows) for name, rows in (fields or {}).items()},
        by_position=by_position,
        images=images,
    )


def places(batch: MicroBatch, prefix_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Count the place of each position in its sequence.

    int32[N, P] of prompts, int32[N*G, R] of responses. prefix_lengths: int32[N]; the rows of responses begin there.
    """
    prefixes = np.tile(np.arange(batch.prefix_size, dtype=np.int32), (batch.count, 1))
    starts = np.repeat(prefix_lengths, batch.samples)[:, None]
    return prefixes, starts + np.arange(batch.response_size, dtype=np.int32)


def position_keys(
    batch: MicroBatch, groups: Sequence[SequenceGroup], draw: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a random number for each position of prompts and responses.

    Returns int32[N, P] and int32[N*G, R]. Each number is a function of `draw`, the group's identity, the sample and the
    position in its sequence, independent of the cut. The samples of a group share the numbers of their prompt.
    """
    prefixes = np.zeros((batch.count, batch.prefix_size), np.int32)
    inputs = np.zeros((batch.count, batch.samples, batch.response_size), np.int32)
    samples = np.arange(1, batch.samples + 1)[:, None]  # 0 is the prompt
    for n, index in enumerate(batch.groups):
        counters = (*draw, *groups[index].identity)
        last = len(groups[index].prompt_ids) - 1
        prefixes[n] = random_keys(*counters, 0, np.arange(batch.prefix_size))
        inputs[n] = random_keys(*counters, samples, last + np.arange(batch.response_size))
    return prefixes, inputs.reshape((-1, batch.response_size))


def routings(batch: MicroBatch, groups: Sequence[SequenceGroup], form: RoutingForm) -> tuple[np.ndarray, np.ndarray]:
    """Pad the routing of groups.

    Returns int32[N, P, width] of prompts and int32[N*G, R, width] of responses.

    Positions without one have `form.experts`.
    """
    prefixes = form.unknown(batch.count, batch.prefix_size).astype(np.int32)
    inputs = form.unknown(batch.count * batch.samples, batch.response_size).astype(np.int32)
    for n, index in enumerate(batch.groups):
        known = groups[index].routing
        if known is None:
            continue
        prefixes[n, : len(known.prompt)] = known.prompt
        for g, row in enumerate(known.responses):
            inputs[n * batch.samples + g, : len(row)] = row
    return prefixes, inputs


def collect_routing(
    batch: MicroBatch,
    sides: Mapping[tuple[int | None, str], np.ndarray],
    form: RoutingForm,
    groups: Sequence[SequenceGroup],
    into: list,
) -> None:
    """Undo `routings`: write into[index] = `Routing` for each group, from side outputs.

    The last layer computes no rows of prompts, so that they have no experts there.
    """
    rows = form.unknown(batch.rows)
    for layer in form.layers:
        own = sides[layer, CHOSEN]
        rows[batch.rows - len(own) :, form.columns(layer)] = own
    prefixes = rows[: batch.prompt_rows].reshape((batch.count, batch.prefix_size, -1))
    inputs = rows[batch.prompt_rows :].reshape((batch.count, batch.samples, batch.response_size, -1))
    for n, index in enumerate(batch.groups):
        group = groups[index]
        responses = (inputs[n, g, : len(response)].copy() for g, response in enumerate(group.responses))
        into[index] = Routing(prefixes[n, : len(group.prompt_ids) - 1].copy(), tuple(responses))
