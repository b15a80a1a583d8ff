"""The planner: every element once, never more than needed, the same result as going through full tensors."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import full_arrays, layout_pairs, model_configs, model_layouts, on_some_ranks, shards_of

from mindrlhf.configs.model import ModelConfig
from mindrlhf.parallel.layout import Layout, Placement, Sharding, full_layout, model_layout, sliced_shape
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.plan import plan

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=4, num_heads=8, num_kv_heads=2, head_dim=4
)


def by_rank(layout, arrays):
    """Rank -> what it holds: what the rank at its place holds of the same layout on ranks 0, 1, 2 and so on."""
    return dict(zip(layout.ranks, shards_of(replace(layout, ranks=()), arrays), strict=True))


def execute(result, arrays, transfers):
    """What every destination rank holds afterwards, and how often each of its elements was written."""
    before = by_rank(result.source, arrays)
    after, writes = {}, {}
    for rank, shards in by_rank(result.destination, arrays).items():
        after[rank] = {name: np.full(array.shape, np.nan, np.float32) for name, array in shards.items()}
        writes[rank] = {name: np.zeros(array.shape, int) for name, array in shards.items()}
    for transfer in transfers:
        box = before[transfer.source][transfer.parameter][transfer.source_slices]
        assert box.size * result.itemsize == transfer.nbytes
        target = after[transfer.destination][transfer.parameter]
        assert target[transfer.destination_slices].shape == box.shape
        target[transfer.destination_slices] = box
        writes[transfer.destination][transfer.parameter][transfer.destination_slices] += 1
    return after, writes


def check(result, transfers):
    arrays = full_arrays(result.destination)
    expected = by_rank(result.destination, arrays)
    after, writes = execute(result, arrays, transfers)
    for rank, shards in expected.items():
        assert after[rank].keys() == shards.keys()
        for name, array in shards.items():
            np.testing.assert_array_equal(after[rank][name], array)
            assert (writes[rank][name] == 1).all()


def elements_missing(result, rank):
    """Elements that a rank needs and does not hold, counted one by one: all elements of all arrays differ."""
    arrays = full_arrays(result.destination)
    needed = by_rank(result.destination, arrays)[rank]
    held = by_rank(result.source, arrays).get(rank, {})
    return sum(np.count_nonzero(~np.isin(array, held.get(name, ()))) for name, array in needed.items())


def check_bytes(result):
    for rank in result.destination.ranks:
        assert result.least[rank] == elements_missing(result, rank) * result.itemsize
        assert result.received[rank] == result.least[rank] <= result.all_gather[rank]
    assert sum(result.sent.values()) == sum(result.received.values()) == sum(t.nbytes for t in result.transfers)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_two_layouts_of_a_model(data):
    config = data.draw(model_configs())
    result = plan(data.draw(model_layouts(config)), data.draw(model_layouts(config)))
    check(result, result.copies + result.transfers)
    check_bytes(result)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_layouts_on_some_of_the_ranks(data):
    """On the same ranks, on others, or on some of them: a rank in one of the two sends only, or receives only."""
    pair = data.draw(layout_pairs())
    most = data.draw(st.integers(max(layout.size for layout in pair), 40))
    source, destination = (data.draw(on_some_ranks(layout, most)) for layout in pair)
    result = plan(source, destination)
    check(result, result.copies + result.transfers)
    check_bytes(result)
    assert result.sent.keys() == set(source.ranks)
    assert result.received.keys() == set(destination.ranks)
    assert all(copy.source in {*source.ranks} & {*destination.ranks} for copy in result.copies)
    if not {*source.ranks} & {*destination.ranks}:
        assert sum(result.received.values()) == result.itemsize * sum(
            array.size for shards in shards_of(destination, full_arrays(destination)) for array in shards.values()
        )


@settings(deadline=None)
@given(layout_pairs(), st.sampled_from((1, 2, 4)))
def test_any_two_layouts_of_any_tensors(pair, itemsize):
    result = plan(*pair, itemsize)
    check(result, result.copies + result.transfers)
    check_bytes(result)
    assert all(transfer.source == transfer.destination for transfer in result.copies)
    assert all(transfer.source != transfer.destination for transfer in result.transfers)


@settings(deadline=None)
@given(layout_pairs(), st.integers(1, 100))
def test_pieces_move_the_same_in_limited_messages(pair, limit):
    result = plan(*pair)
    pieces = [piece for transfer in result.copies + result.transfers for piece in transfer.split(limit)]
    assert all(piece.nbytes <= max(limit, result.itemsize) for piece in pieces)
    check(result, pieces)


def test_pieces_are_of_about_one_size():
    """A small rest would cost as much as a whole message."""
    rows = 17
    (whole,) = plan(full_layout({"weight": (rows, 3)}, 0), full_layout({"weight": (rows, 3)}, 1), 4).transfers
    assert [piece.nbytes // 12 for piece in whole.split(8 * 12)] == [6, 6, 5]
    assert [piece.nbytes // 12 for piece in whole.split(rows * 12)] == [rows]


@settings(deadline=None)
@given(layout_pairs())
def test_nothing_comes_in_for_equal_parts(pair):
    """So a rank that holds the same part before and after can use one array for both."""
    result = plan(*pair)
    for transfer in result.transfers:
        rank, name = transfer.destination, transfer.parameter
        assert rank >= pair[0].size or pair[0].slices(rank, name) != pair[1].slices(rank, name)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_equal_layouts_move_nothing(data):
    config = data.draw(model_configs())
    layout = data.draw(model_layouts(config))
    result = plan(layout, layout)
    assert result.transfers == ()
    for copy in result.copies:
        shape = layout.shape(copy.source, copy.parameter)
        assert sliced_shape(copy.source_slices) == sliced_shape(copy.destination_slices) == shape


def test_users_pair_of_layouts():
    """tp4 x pp2 -> dp2 x tp4: each half of the ranks gets the other half's stage, from the rank at its own position."""
    source = model_layout(MODEL, Mesh(pp=2, tp=4), vocab_emb_dp=False)
    result = plan(source, model_layout(MODEL, Mesh(dp=2, tp=4), vocab_emb_dp=False))
    assert {(t.source, t.destination) for t in result.transfers} == {(r, (r + 4) % 8) for r in range(8)}
    before = [sum(np.prod(sliced_shape(part)) for _, part in source.shards(rank)) * 4 for rank in range(8)]
    assert [result.received[rank] for rank in range(8)] == before[4:] + before[:4]
    assert len(result.copies) == len(result.transfers) == sum(len(list(source.shards(rank))) for rank in range(8))


def test_experts_go_to_ranks_that_have_some_of_them_whole_and_back():
    """tp2 -> ep2: half of each expert's columns to half of the experts; a rank has a quarter of them on both sides."""
    sizes = {"family": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = MODEL.model_copy(update={**sizes, "attention_bias": False})
    tensor, spread = model_layout(model, Mesh(tp=2)), model_layout(model, Mesh(ep=2))
    for result in (plan(tensor, spread), plan(spread, tensor)):
        check(result, result.copies + result.transfers)
        check_bytes(result)
        experts = [t for t in result.transfers if ".ffn." in t.parameter]
        assert sum(t.nbytes for t in experts) == 2 * 3 * 4 * 8 * 16 * MODEL.num_layers  # half of three maps, float32
    name = "model.layers.0.feed_forward.routed_experts.ffn.w2.weight"
    assert [spread.slices(rank, name)[0] for rank in range(2)] == [slice(0, 2), slice(2, 4)]
    both = model_layout(model, Mesh(dp=2, ep=2, tp=2, pp=2))
    assert both.shape(0, name) == (2, 16, 4)
    assert both.holders(name).keys() == {((i, i + 2), (0, 16), (j, j + 4)) for i in (0, 2) for j in (0, 4)}
    back = plan(both, tensor)
    check(back, back.copies + back.transfers)


def test_replicas_share_the_sending():
    """dp4 in two stages -> dp8: of the four ranks that hold a layer, each sends it to one of the other four."""
    result = plan(model_layout(MODEL, Mesh(dp=4, pp=2)), model_layout(MODEL, Mesh(dp=8)))
    assert result.sent == {r: result.received[(r + 4) % 8] for r in range(8)}
    # and where fewer ask than hold it, the ones that have not sent yet are asked
    whole = Sharding((4,), ((),))
    source = Layout(2, 4, {f"p{i}": Placement((6,), {0: whole}) for i in range(4)})
    goal = Layout(8, 1, {f"p{i}": Placement((6,), {4 + i: Sharding((1,), ((),))}) for i in range(4)})
    assert [(t.source, t.destination) for t in plan(source, goal).transfers] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_what_goes_to_several_ranks_stands_together():
    result = plan(model_layout(MODEL, Mesh(tp=2, pp=2)), model_layout(MODEL, Mesh(dp=4)))
    order = [(t.parameter, t.source, str(t.source_slices)) for t in result.transfers]
    assert len(set(order)) == sum(a != b for a, b in zip(order, [None, *order], strict=False))


def test_description_gives_bytes_beside_the_least_possible_and_an_all_gather():
    shards = Sharding((2,), ((0,), ()))
    result = plan(Layout(1, 2, {"w": Placement((1000, 2), {0: shards})}), full_layout({"w": (1000, 2)}), itemsize=2)
    lines = result.describe().splitlines()
    assert lines[0] == "1 parameters from 2 to 1 ranks: 1 transfers, 1 local copies"
    assert re.split(" {2,}", lines[1]) == [
        "bytes",
        "holds before",
        "holds after",
        "sends",
        "receives",
        "least possible",
        "all-gather",
    ]
    assert [line.split() for line in lines[2:]] == [
        ["rank", "0", "2,000", "4,000", "0", "2,000", "2,000", "2,000"],
        ["rank", "1", "2,000", "-", "2,000", "-", "-", "-"],
        ["all", "4,000", "4,000", "2,000", "2,000", "2,000", "2,000"],
    ]
    assert result.describe(every_transfer=True).splitlines()[5:] == [
        "w: rank 1 [0:500, 0:2] -> rank 0 [500:1000, 0:2], 2,000 bytes"
    ]


@pytest.mark.parametrize("other", [{"b": (2, 2)}, {"a": (2, 4)}, {"a": (2, 2), "b": (1,)}])
def test_layouts_of_other_parameters_are_refused(other):
    with pytest.raises(ValueError, match="in one only"):
        plan(full_layout({"a": (2, 2)}), full_layout(other))
