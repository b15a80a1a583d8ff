"""Weights from layout to layout between ranks: bit-equal to going through full tensors.

First with ranks as threads of this process, for any layouts; then real workers, several pairs of layouts in one run.
"""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import full_arrays, layout_pairs, model_configs, model_layouts
from mindspore import Parameter, Tensor, nn
from ranks import run_ranks
from workers import run_workers

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.tcp import NO_CHANNELS
from mindrlhf.backend.process.launch import World
from mindrlhf.configs.model import ModelConfig
from mindrlhf.parallel.layout import Layout, Placement, Sharding, full_layout, model_layout, sliced_shape
from mindrlhf.parallel.mesh import Mesh
from mindrlhf.reshard.online import OnlineReshard, ReshardError, gather_full
from mindrlhf.reshard.plan import plan

EACH_MEMORY = pytest.mark.usefixtures("memory")

MODEL = ModelConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=4
)
TIED = MODEL.model_copy(update={"tie_word_embeddings": True})


def parts(layout: Layout, rank: int, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A rank's own copies of its parts; none for a rank outside of the layout."""
    return {name: np.array(arrays[name][part]) for name, part in layout.shards(rank)}


def parameters(arrays: dict[str, np.ndarray]) -> dict[str, Parameter]:
    return {name: Parameter(Tensor(array), name=name) for name, array in arrays.items()}


def held(layout: Layout, rank: int, arrays: dict[str, np.ndarray]) -> dict[str, Parameter]:
    """A rank's parts as parameters."""
    return parameters(parts(layout, rank, arrays))


def empty(layout: Layout, rank: int, dtype: str = "float32") -> dict[str, Parameter]:
    return parameters({name: np.full(sliced_shape(part), 77, dtype) for name, part in layout.shards(rank)})


def assert_same(found: dict[str, Parameter | np.ndarray], expected: dict[str, np.ndarray]) -> None:
    found = {name: backend.read(part) if isinstance(part, Parameter) else part for name, part in found.items()}
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes(), name


def run_collectives(size: int, function) -> list:
    """`function(rank, collectives)` on a thread for each rank; only messages between pairs of ranks are possible."""

    def run(rank, peers):
        return function(rank, Collectives(World(rank, size, "CPU", channels=replace(NO_CHANNELS, messages=peers))))

    return run_ranks(size, run)


def check_pair(source: Layout, destination: Layout, dtype: str, bucket_bytes: int) -> None:
    """Reshard on threads, twice, with other weights the second time."""
    first = {name: array.astype(dtype) for name, array in full_arrays(source).items()}
    second = {name: np.asarray(array + 1, dtype) for name, array in first.items()}
    made = plan(source, destination, np.dtype(dtype).itemsize)

    def run(rank, collectives):
        before, after = held(source, rank, first), empty(destination, rank, dtype)
        reshard = OnlineReshard(made, collectives, before, after, bucket_bytes)
        statistics = reshard.run(verify=True)
        assert_same(after, parts(destination, rank, first))
        assert_same(before, parts(source, rank, first))
        own = sum(transfer.nbytes for transfer in made.copies if transfer.source == rank)
        assert statistics.bytes_copied == own
        assert statistics.bytes_sent == made.sent.get(rank, 0)
        assert statistics.bytes_received == made.received.get(rank, 0)
        assert statistics.bytes_shared == 0
        for name, array in parts(source, rank, second).items():
            backend.write(before[name], array)
        reshard.run()
        assert_same(after, parts(destination, rank, second))

    run_collectives(1 + max(*source.ranks, *destination.ranks), run)


@EACH_MEMORY
@pytest.mark.parametrize("bucket_bytes", [100, 1 << 20])
def test_two_layouts_in_each_memory(bucket_bytes):
    layouts = model_layout(TIED, Mesh(tp=2, pp=2), offset=(1, 0)), model_layout(TIED, Mesh(dp=2, tp=2))
    check_pair(*layouts, "float32", bucket_bytes)


@pytest.mark.parametrize("ranks", [(2, 3), (1, 3), (0, 2)])
def test_from_some_ranks_to_others(ranks):
    """Training on two ranks of four, generation on two, which may be others, or none in common."""
    training = model_layout(TIED, Mesh(pp=2, ranks=(0, 1)), offset=(1, 0))
    generation = model_layout(TIED, Mesh(tp=2, ranks=ranks))
    check_pair(training, generation, "float32", 100)
    check_pair(generation, training, "float32", 1 << 20)


def test_a_model_on_some_ranks_is_gathered_on_the_first_of_them():
    layout = model_layout(TIED, Mesh(tp=2, ranks=(2, 3)))
    full = full_arrays(layout)

    def run(rank, collectives):
        found = dict(gather_full(layout, collectives, held(layout, rank, full)))
        if rank == 2:
            assert_same(found, full)
        else:
            assert found == dict.fromkeys(full)

    run_collectives(4, run)


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_two_layouts_of_a_model(data):
    config = data.draw(model_configs())
    layouts = [data.draw(model_layouts(config, max_dp=2)) for _ in range(2)]
    check_pair(*layouts, "float32", data.draw(st.sampled_from([8, 100, 1 << 20])))


@settings(max_examples=40, deadline=None)
@given(layout_pairs(), st.sampled_from(["float32", "float16", "int64"]), st.integers(1, 200))
def test_any_two_layouts_of_any_tensors(pair, dtype, bucket_bytes):
    check_pair(*pair, dtype, bucket_bytes)


@settings(max_examples=25, deadline=None)
@given(layout_pairs(), st.sampled_from(["float32", "float16"]))
def test_gathering_for_saving(pair, dtype):
    layout = pair[0]
    arrays = {name: array.astype(dtype) for name, array in full_arrays(layout).items()}

    def run(rank, collectives):
        gathered = list(gather_full(layout, collectives, held(layout, rank, arrays), dtype))
        assert [name for name, _ in gathered] == list(layout.shapes)
        if rank == 0:
            assert_same(dict(gathered), arrays)
        else:
            assert all(full is None for _, full in gathered)

    run_collectives(layout.size, run)


def test_gathering_gives_what_rank_0_has_without_a_copy(memory):
    if memory == "copying":
        pytest.skip("the host sees nothing but copies")
    layout = model_layout(MODEL, Mesh(dp=2))
    arrays = full_arrays(layout)

    def run(rank, collectives):
        shards = held(layout, rank, arrays)
        gathered = gather_full(layout, collectives, shards)
        return [full is not None and np.shares_memory(full, shards[name].asnumpy()) for name, full in gathered]

    assert all(run_collectives(2, run)[0])


@EACH_MEMORY
def test_gathering_keeps_nothing_that_it_has_given():
    layout = model_layout(TIED, Mesh(tp=2, pp=2), offset=(1, 0), vocab_emb_dp=False)
    arrays = full_arrays(layout)

    def run(rank, collectives):
        shards = held(layout, rank, arrays)
        given = []
        for _, full in gather_full(layout, collectives, shards):
            assert all(earlier() is None for earlier in given)
            if full is not None:
                given.append(weakref.ref(full))
            del full
        return len(given)

    assert run_collectives(4, run)[0] > len(layout.shapes) // 2


@EACH_MEMORY
def test_arrays_of_both_sides_stay_where_they_are():
    """tp2 in two stages -> tp2 twice: a rank's own stage serves both layouts, the other's comes."""
    source, destination = model_layout(TIED, Mesh(tp=2, pp=2), offset=(1, 0)), model_layout(TIED, Mesh(dp=2, tp=2))
    made = plan(source, destination)
    arrays = full_arrays(source)

    def run(rank, collectives):
        before, after = held(source, rank, arrays), empty(destination, rank)
        after |= before
        statistics = OnlineReshard(made, collectives, before, after).run(verify=True)
        assert_same(after, parts(destination, rank, arrays))
        assert statistics.bytes_copied == 0
        assert statistics.bytes_shared == sum(parameter.nbytes for parameter in before.values())

    run_collectives(4, run)


@EACH_MEMORY
@pytest.mark.parametrize("changed", ["received", "copied"])
def test_verification_notices_one_bit_and_names_parameter_and_ranks(changed):
    source, destination = model_layout(MODEL, Mesh(tp=2)), model_layout(MODEL, Mesh(dp=2))
    made, arrays = plan(source, destination), full_arrays(source)
    name = "model.layers.1.feed_forward.w2.weight"  # cut by columns: rank 1's part goes into the right half

    def run(rank, collectives):
        before, after = held(source, rank, arrays), empty(destination, rank)
        reshard = OnlineReshard(made, collectives, before, after, bucket_bytes=100)
        reshard.run(verify=True)
        if rank == 0:
            spoilt = np.array(backend.read(after[name]))
            spoilt.view(np.uint32)[3, 20 if changed == "received" else 2] ^= 1
            backend.write(after[name], spoilt)
            giver = 1 if changed == "received" else 0
            with pytest.raises(ReshardError, match=rf"{name}: rank {giver} .*-> rank 0 "):
                reshard.verify()
        else:
            reshard.verify()

    run_collectives(2, run)


def test_arrays_that_are_not_the_layouts_are_refused():
    layout = full_layout({"a": (2, 3)})
    collectives = Collectives(World(rank=0, size=1, device_target="CPU"))
    good = {"a": np.zeros((2, 3), np.float32)}

    def refuse(source, destination, message):
        with pytest.raises(ValueError, match=message):
            OnlineReshard(plan(layout, layout), collectives, parameters(source), parameters(destination))

    refuse(good, {}, "a part of a, which is not given")
    refuse({"a": good["a"].T}, good, r"a: .* \[2, 3\] of 4 bytes each, not \[3, 2\]")
    refuse({"a": good["a"].astype(np.float64)}, good, "of Float64")
    refuse(good, {"a": good["a"].astype(np.int32)}, "of one dtype, not of Float32 and Int32")


# kv heads below tp (rank pairs share a head), a head of its own and a tied one; the embedding whole and cut.
PAIRS = [
    (TIED, Mesh(tp=2, pp=2), Mesh(dp=2, tp=2)),
    (MODEL, Mesh(tp=2, pp=2), Mesh(dp=2, tp=2)),
    (MODEL, Mesh(dp=4), Mesh(tp=4)),
    (TIED, Mesh(tp=4), Mesh(dp=4)),
    (MODEL, Mesh(dp=2, pp=2), Mesh(dp=2, tp=2)),
    (TIED, Mesh(dp=2, tp=2), Mesh(tp=4)),
    (MODEL, Mesh(tp=4), Mesh(tp=2)),
    (MODEL, Mesh(dp=2, tp=2), Mesh(dp=2, tp=2)),
]


def check_workers(world: World) -> list[tuple[int, int]]:
    """Runs in each worker; returns the bytes that it sent and received for each pair."""
    collectives = Collectives(world)
    check_graph(collectives)
    check_corruption(collectives)
    moved = []
    for number, (model, *meshes) in enumerate(PAIRS):
        source, destination = (
            model_layout(model, mesh, offset=(1, 0) if mesh.pp == 2 else 0, vocab_emb_dp=bool(number % 2))
            for mesh in meshes
        )
        made, arrays = plan(source, destination), full_arrays(source)
        before, after = held(source, world.rank, arrays), empty(destination, world.rank)
        statistics = OnlineReshard(made, collectives, before, after, bucket_bytes=300).run(verify=True)
        assert_same(after, parts(destination, world.rank, arrays))
        gathered = dict(gather_full(source, collectives, before))
        if world.rank == 0:
            assert_same(gathered, arrays)
        moved.append((statistics.bytes_sent, statistics.bytes_received))
    return moved


def check_graph(collectives: Collectives) -> None:
    """A graph that has run with its parameter sees what a reshard writes there."""

    class Sum(nn.Cell):
        def __init__(self):
            super().__init__()
            self.w = Parameter(Tensor(np.ones((4, 6), np.float32)), name="w")

        def construct(self):
            return self.w.sum()

    graph = Sum()
    assert graph().asnumpy() == 24
    layouts = [Layout(1, 4, {"w": Placement((4, 6), {0: Sharding((4,), cuts)})}) for cuts in (((0,), ()), ((), ()))]
    row = np.arange(6, dtype=np.float32).reshape(1, 6) + collectives.world.rank
    OnlineReshard(plan(*layouts), collectives, parameters({"w": row}), {"w": graph.w}).run()
    assert graph().asnumpy() == 4 * 15 + 6 * (0 + 1 + 2 + 3)


def check_corruption(collectives: Collectives) -> None:
    source, destination = (model_layout(MODEL, mesh) for mesh in (Mesh(tp=4), Mesh(dp=4)))
    rank = collectives.world.rank
    before, after = held(source, rank, full_arrays(source)), empty(destination, rank)
    reshard = OnlineReshard(plan(source, destination), collectives, before, after)
    reshard.run()
    if rank == 2:
        spoilt = np.array(backend.read(after["lm_head.weight"]))
        spoilt[-1, -1] += 1  # rank 3's part
        backend.write(after["lm_head.weight"], spoilt)
        with pytest.raises(ReshardError, match=r"lm_head.weight: rank 3 .* -> rank 2 "):
            reshard.verify()
    else:
        reshard.verify()


@pytest.mark.slow
@pytest.mark.msrun
def test_four_workers():
    totals = np.sum(run_workers(4, __file__, "check_workers"), axis=0)
    assert (totals[:, 0] == totals[:, 1]).all()
    assert np.flatnonzero(totals[:, 0] == 0).tolist() == [2, 7]  # dp4 -> tp4 drops what it has; equal layouts
