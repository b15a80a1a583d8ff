"""Cutting groups into padded micro-batches: every token exactly once, padding without weight, the budget kept."""

import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_threads

from mindrlhf.shapes import round_up
from mindrlhf.training.batch import MicroBatch, SequenceGroup, collect, collect_sampled, cut, pad, spread

LENGTHS = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 40), min_size=1, max_size=5))
CASES = st.tuples(st.lists(LENGTHS, min_size=1, max_size=12), st.integers(1, 600), st.sampled_from([1, 4, 8, 32]))


def groups_of(lengths, seed=0):
    """(prompt length, response lengths) of each group -> groups of random ids, none of them 0."""
    rng = np.random.default_rng(seed)
    return [
        SequenceGroup(
            rng.integers(1, 1000, p).astype(np.int32), tuple(rng.integers(1, 1000, r).astype(np.int32) for r in rs)
        )
        for p, rs in lengths
    ]


def values_of(groups, seed=1):
    """float32[R] for each response."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.random(len(r)).astype(np.float32) + 1 for r in group.responses) for group in groups]


@given(CASES)
def test_every_group_runs_once_within_the_budget(case):
    lengths, max_tokens, bucket = case
    groups = groups_of(lengths)
    cuts = cut(groups, max_tokens, bucket)
    assert sorted(index for micro in cuts for index in micro.groups) == list(range(len(groups)))
    assert len({(micro.count, micro.samples) for micro in cuts}) == 1
    for micro in cuts:
        assert 1 <= len(micro.groups) <= micro.count
        assert micro.samples == max(len(group.responses) for group in groups)
        assert micro.response_size % bucket == micro.prefix_size % bucket == 0
        members = [groups[index] for index in micro.groups]
        longest = max(len(response) for group in members for response in group.responses)
        longest_prefix = max(len(group.prompt_ids) - 1 for group in members)
        assert longest <= micro.response_size < longest + bucket
        assert longest_prefix <= micro.prefix_size < max(1, longest_prefix) + bucket
        size = micro.count * (micro.prefix_size + micro.samples * micro.response_size)
        assert size <= max_tokens or micro.count == 1
    # Weight-0 groups are only what it takes to make the micro-batches equal.
    assert sum(micro.count for micro in cuts) - len(groups) < len(cuts)
    sizes = [micro.response_size for micro in cuts]
    assert sizes == sorted(sizes)


@given(CASES)
def test_numbers_of_positions_do_not_depend_on_the_cut(case):
    """Each group alone, and in micro-batches; a position past its prompt goes on in all samples."""
    lengths, max_tokens, bucket = case
    groups = [replace(group, identity=(7, number)) for number, group in enumerate(groups_of(lengths))]
    found: dict[int, set] = {}
    for micros in (cut(groups, max_tokens, bucket), cut(groups, 10**6, 64)):
        for micro in micros:
            batch = pad(micro, groups, draw=(3, 5))
            prefixes, rows = batch.by_position["dropout_keys"]
            inputs = rows.reshape(micro.count, micro.samples, -1)
            for n, index in enumerate(micro.groups):
                size, group = len(groups[index].prompt_ids) - 1, groups[index]
                own = [prefixes[n, :size], *(inputs[n, g, : len(r)] for g, r in enumerate(group.responses))]
                found.setdefault(index, set()).add(b"".join(part.tobytes() for part in own))
    assert all(len(seen) == 1 for seen in found.values())
    assert len(set.union(*found.values())) == len(groups)
    assert "dropout_keys" not in pad(micro, groups).by_position
    other = pad(micro, groups, draw=(3, 6)).by_position["dropout_keys"][1]
    assert (other != rows).mean() > 0.9
    numbers = rows[: len(micro.groups) * micro.samples]
    assert len(np.unique(numbers)) > 0.99 * numbers.size


@given(CASES)
def test_padded_arrays_hold_the_sequences_and_nothing_else(case):
    lengths, max_tokens, bucket = case
    groups = groups_of(lengths)
    weights, first, second = (values_of(groups, seed) for seed in range(3))
    for micro in cut(groups, max_tokens, bucket):
        batch = pad(micro, groups, weights, {"advantages": first, "returns": second})
        assert set(batch.fields) == {"advantages", "returns"}
        pairs = [(batch.weights, weights), (batch.fields["advantages"], first), (batch.fields["returns"], second)]
        used = np.zeros_like(batch.mask)
        for n, index in enumerate(micro.groups):
            group = groups[index]
            assert batch.prefix_lengths[n] == len(group.prompt_ids) - 1
            for g, response in enumerate(group.responses):
                row, size = n * micro.samples + g, len(response)
                prefix = batch.prefix_ids[n, : batch.prefix_lengths[n]]
                # Input r and target r are neighbours in prompt + response, and the targets are the response.
                whole = np.concatenate([group.prompt_ids, response])
                np.testing.assert_array_equal(np.concatenate([prefix, batch.input_ids[row, :size]]), whole[:-1])
                np.testing.assert_array_equal(batch.targets[row, :size], response)
                for array, values in pairs:
                    np.testing.assert_array_equal(array[row, :size], values[index][g])
                used[row, :size] = 1
        np.testing.assert_array_equal(batch.mask, used)
        np.testing.assert_array_equal(batch.lengths, used.sum(1))
        for array in (batch.weights, *batch.fields.values(), batch.input_ids, batch.targets):
            assert (array[used == 0] == 0).all()
        assert not pad(micro, groups).weights.any()
        assert (batch.prefix_lengths[len(micro.groups) :] == 0).all()
        assert (batch.prefix_ids[np.arange(micro.prefix_size) >= batch.prefix_lengths[:, None]] == 0).all()
        for name, dtype in (("prefix_ids", "int32"), ("input_ids", "int32"), ("targets", "int32"), ("mask", "float32")):
            assert getattr(batch, name).dtype == dtype
        assert batch.weights.shape == batch.targets.shape == (micro.count * micro.samples, micro.response_size)


def test_the_mask_leaves_out_what_was_not_sampled():
    """The tokens are in the batch all the same: later ones attend to them."""
    [group] = groups_of([(3, [5, 2])])
    mixed = replace(group, sampled=(np.array([True, False, False, True, True]), np.array([False, True])))
    [micro] = cut([mixed], 100, 8)
    batch, whole = pad(micro, [mixed]), pad(micro, [group])
    np.testing.assert_array_equal(batch.mask[:, :5], [[1, 0, 0, 1, 1], [0, 1, 0, 0, 0]])
    assert not batch.mask[:, 5:].any()
    assert batch.mask.dtype == np.float32
    for name in ("lengths", "input_ids", "targets", "prefix_ids", "prefix_lengths"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(whole, name))
    assert batch.lengths.tolist() == [5, 2]
    into = [None]
    collect_sampled(micro, batch.targets, [mixed], into)
    assert [row.tolist() for row in into[0]] == [group.responses[0][[0, 3, 4]].tolist(), [group.responses[1][1]]]


@given(CASES)
def test_collect_undoes_spread(case):
    lengths, max_tokens, bucket = case
    groups = groups_of(lengths)
    values = values_of(groups)
    back = [None] * len(groups)
    total = 0.0
    for micro in cut(groups, max_tokens, bucket):
        array = spread(micro, "values", values)
        assert array.dtype == np.float32
        total += array.sum(dtype=np.float64)
        collect(micro, array, groups, back)
        array[...] = -1  # what was collected is a copy
    for given_rows, rows in zip(values, back, strict=True):
        assert len(given_rows) == len(rows)
        for expected, got in zip(given_rows, rows, strict=True):
            np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(total, sum(row.sum(dtype=np.float64) for rows in values for row in rows))


def test_short_groups_run_together():
    lengths = [(4, [30, 2]), (4, [5, 6]), (4, [29, 28]), (4, [3, 1]), (4, [7, 7]), (4, [31, 9])]
    cuts = cut(groups_of(lengths), 220, 8)
    assert [micro.groups for micro in cuts] == [(1, 3, 4), (0, 2, 5)]
    assert [micro.shape for micro in cuts] == [(3, 2, 8, 8), (3, 2, 8, 32)]


def test_few_shapes_compile():
    """A hundred steps of varying lengths: what decides over compilation takes a handful of values."""
    rng = np.random.default_rng(0)
    shapes = set()
    for seed in range(100):
        lengths = [(int(rng.integers(40, 64)), rng.integers(1, 64, 8).tolist()) for _ in range(8)]
        shapes |= {micro.shape for micro in cut(groups_of(lengths, seed), 16384, 32)}
    assert shapes <= {(8, 8, 64, 32), (8, 8, 64, 64)}


@given(st.lists(st.tuples(st.lists(LENGTHS, max_size=6)), min_size=2, max_size=3), st.integers(1, 600))
def test_ranks_that_compute_together_have_equal_micro_batches(ranks, max_tokens):
    """As many, of the same sizes; each rank's groups run once, and a rank with fewer has micro-batches without any."""
    every = [groups_of(lengths, seed) for seed, (lengths,) in enumerate(ranks)]
    meet = Meeting(len(every))
    results = run_threads(len(every), lambda rank: cut(every[rank], max_tokens, 8, 1, meet))
    assert len({tuple(micro.shape for micro in cuts) for cuts in results}) == 1
    for groups, cuts in zip(every, results, strict=True):
        assert sorted(index for micro in cuts for index in micro.groups) == list(range(len(groups)))
        for micro in cuts:
            batch = pad(micro, groups)
            assert batch.input_ids.shape == (micro.count * micro.samples, micro.response_size)
            assert batch.mask.sum() == sum(len(row) for index in micro.groups for row in groups[index].responses)


class Meeting:
    """Elementwise maximum over threads that stand for ranks."""

    def __init__(self, ranks: int):
        self.barrier, self.given = threading.Barrier(ranks), []

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        if self.barrier.wait() == 0:
            self.given = []
        self.barrier.wait()
        self.given.append(numbers)
        self.barrier.wait()
        found = np.max(np.stack(self.given), 0)
        self.barrier.wait()
        return found


def test_nothing_to_cut():
    assert cut([], 100, 8) == []


@pytest.mark.parametrize("multiple", [1, 8, 32])
def test_round_up(multiple):
    sizes = [round_up(number, multiple) for number in range(100)]
    assert sizes[:2] == [0, multiple]
    for number, size in enumerate(sizes):
        assert size % multiple == 0
        assert number <= size < number + multiple
    assert all(b >= a for a, b in pairwise(sizes))


def test_a_micro_batch_knows_its_shape():
    assert MicroBatch((4, 2), 3, 8, 32, 64).shape == (3, 8, 32, 64)
