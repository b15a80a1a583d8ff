"""Collectives on arrays and in graphs against NumPy, on one process, two and four workers.

One function holds all checks of a run, because starting workers takes far longer than the checks. Each rank knows
what every other rank contributes (`contribution` is a pure function of the rank), so it can compute what must arrive.
"""

from dataclasses import replace

import numpy as np
import pytest
from workers import run_workers

from mindrlhf.backend.comm import collectives as collectives_module
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.process.launch import World

FLOAT32_EDGES = np.array(
    [0.0, -0.0, 1.5, -np.inf, np.inf, np.nan, np.finfo("f4").max, np.finfo("f4").tiny, 1e-45, -1e-45], np.float32
)
FLOAT64_EDGES = np.array([-0.0, 1 / 3, np.nan, np.inf, 5e-324, np.finfo("f8").max, 1e300], np.float64)
INT64_EDGES = np.array([np.iinfo("i8").min, np.iinfo("i8").max, -1, 0, 2**53 + 1, -(2**40) - 7], np.int64)
INT32_EDGES = np.array([np.iinfo("i4").min, np.iinfo("i4").max, -1, 2**24 + 1], np.int32)


def contribution(rank: int, dtype: str, shape: tuple[int, ...] = (3, 1001)) -> np.ndarray:
    bits = np.random.default_rng([rank, len(dtype)]).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    if np.dtype(dtype).kind == "f":
        return (bits[..., 0].astype(dtype) - 128) / 7
    return bits[..., 0] > 127 if dtype == "bool" else bits.view(dtype).reshape(shape)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


def check_sums(collectives: Collectives, group: tuple[int, ...]) -> None:
    for dtype in ("int32", "int64", "float64"):
        mine = contribution(collectives.world.rank, dtype)
        before = mine.copy()
        expected = np.stack([contribution(rank, dtype) for rank in group]).sum(axis=0, dtype=dtype)
        assert_same_bits(collectives.all_reduce_sum(mine, group), expected)
        assert_same_bits(mine, before)
    mine = contribution(collectives.world.rank, "float32")
    total = collectives.all_reduce_sum(mine, group)
    expected = np.stack([contribution(rank, "float32") for rank in group]).astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(total, expected, rtol=1e-6, atol=1e-5)
    for copy in collectives.all_gather(total, group):
        assert_same_bits(total, copy)
    # Every other rank gives -0.0, which added to anything changes no bit of it: inf, NaN and subnormals must survive.
    here = collectives.world.rank == group[-1]
    edges = collectives.all_reduce_sum(FLOAT32_EDGES if here else np.full_like(FLOAT32_EDGES, -0.0), group)
    assert_same_bits(edges, FLOAT32_EDGES)
    wrapped = collectives.all_reduce_sum(INT64_EDGES, group)
    assert_same_bits(wrapped, np.stack([INT64_EDGES] * len(group)).sum(axis=0))


def check_moves(collectives: Collectives, group: tuple[int, ...]) -> None:
    rank = collectives.world.rank
    for dtype in ("float32", "float64", "int32", "int64", "bool", "uint8", "float16"):
        expected = np.stack([contribution(other, dtype) for other in group])
        assert_same_bits(collectives.all_gather(contribution(rank, dtype), group), expected)
    for edges in (FLOAT32_EDGES, FLOAT64_EDGES, INT64_EDGES, INT32_EDGES, np.array(7), np.zeros((0, 4), np.float32)):
        assert_same_bits(collectives.all_gather(edges, group), np.stack([edges] * len(group)))
    transposed = np.asfortranarray(contribution(rank, "int32"))
    assert_same_bits(
        collectives.all_gather(transposed, group), np.stack([contribution(other, "int32") for other in group])
    )


def check_maxima(collectives: Collectives, group: tuple[int, ...]) -> None:
    rank = collectives.world.rank
    for dtype in ("float32", "int64", "bool"):
        expected = np.stack([contribution(other, dtype) for other in group]).max(axis=0)
        assert_same_bits(collectives.all_reduce_max(contribution(rank, dtype), group), expected)
    for bad in group:  # wherever a NaN comes from, it wins
        assert np.isnan(collectives.all_reduce_max(np.array([np.nan if rank == bad else 1.0], np.float32), group))


def check_objects(collectives: Collectives, group: tuple[int, ...]) -> None:
    rank = collectives.world.rank
    values = [
        {"rank": other, "bytes": bytes(range(256)) * other, "text": "é" * other} for other in range(max(group) + 1)
    ]
    assert collectives.all_gather_object(values[rank], group) == [values[other] for other in group]
    assert collectives.broadcast_object(values[rank], group[-1], group) == values[group[-1]]


def check_buckets(collectives: Collectives, group: tuple[int, ...]) -> None:
    """Arrays longer than a bucket, by a remainder, give the same as in one piece."""
    whole = collectives_module.BUCKET_BYTES, collectives_module.SMALL_BYTES
    collectives_module.BUCKET_BYTES = collectives_module.SMALL_BYTES = 1 << 12
    try:
        check_sums(collectives, group)
        check_moves(collectives, group)
    finally:
        collectives_module.BUCKET_BYTES, collectives_module.SMALL_BYTES = whole


def check_ranks(collectives: Collectives, group: tuple[int, ...]) -> None:
    """Operations over some ranks need no group, and have a first rank of their own."""
    rank, some = collectives.world.rank, collectives.over(group)
    assert some.all_gather_object(rank) == list(group)
    assert (some.size, some.place, some.is_first) == (len(group), group.index(rank), rank == group[0])
    assert some.broadcast_object(rank, root=group[-1]) == group[-1]
    some.barrier()


def check_refusals(collectives: Collectives) -> None:
    with pytest.raises(TypeError, match="object"):
        collectives.all_gather(np.array([None]))
    with pytest.raises(ValueError, match="not in tuple"):
        collectives.broadcast_object(1, root=9)
    with pytest.raises(ValueError, match="is not in the group"):
        collectives.barrier([(collectives.world.rank + 1) % collectives.world.size])
    with pytest.raises(ValueError, match="ascending"):
        collectives.barrier([1, 0])


def mlp_gradients(x, a, b):
    """Value and gradients of sum((relu(x a) b)^2) / 2 in float64."""
    x, a, b = (array.astype(np.float64) for array in (x, a, b))
    hidden = np.maximum(x @ a, 0)
    y = hidden @ b
    d_hidden = (y @ b.T) * (hidden > 0)
    return (y * y).sum() / 2, d_hidden @ a.T, x.T @ d_hidden, hidden.T @ y


def check_tensor_parallel(collectives: Collectives, group: tuple[int, ...]) -> None:
    """A column- and a row-parallel layer in one compiled graph: value and gradients as on one process."""
    import mindspore
    from mindspore import Parameter, Tensor, nn, ops

    from mindrlhf.backend.comm.graph_collectives import CopyToGroup, ReduceFromGroup

    class Mlp(nn.Cell):
        def __init__(self, a, b):
            super().__init__()
            self.enter, self.leave = CopyToGroup(collectives, group), ReduceFromGroup(collectives, group)
            self.a, self.b = Parameter(Tensor(a), name="a"), Parameter(Tensor(b), name="b")

        def construct(self, x):
            y = self.leave(ops.matmul(ops.relu(ops.matmul(self.enter(x), self.a)), self.b))
            return (y * y).sum() / 2

    random = np.random.default_rng(3)
    x, a, b = (random.normal(size=shape).astype(np.float32) for shape in ((5, 6), (6, 12), (12, 4)))
    width = 12 // len(group)
    here = slice(group.index(collectives.world.rank) * width, (group.index(collectives.world.rank) + 1) * width)
    mlp = Mlp(a[:, here].copy(), b[here].copy())
    value_and_grad = ops.value_and_grad(mlp, 0, mlp.trainable_params())

    @mindspore.jit
    def run(x):
        return value_and_grad(x)

    value, (d_x, (d_a, d_b)) = run(Tensor(x))
    expected_value, expected_d_x, expected_d_a, expected_d_b = mlp_gradients(x, a, b)
    np.testing.assert_allclose(value.asnumpy(), expected_value, rtol=1e-5)
    np.testing.assert_allclose(d_x.asnumpy(), expected_d_x, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_a.asnumpy(), expected_d_a[:, here], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(d_b.asnumpy(), expected_d_b[here], rtol=1e-4, atol=1e-4)


def check_independent_reductions(collectives: Collectives, groups: list[tuple[int, ...]]) -> None:
    """Reductions that do not depend on each other keep one order on all ranks, also over several groups."""
    import mindspore
    from mindspore import Tensor, nn, ops

    from mindrlhf.backend.comm.graph_collectives import graph_all_reduce

    class Many(nn.Cell):
        def __init__(self):
            super().__init__()
            self.reduce = tuple(graph_all_reduce(collectives, group) for group in groups)

        def construct(self, arrays, matrix):
            delayed = ops.tanh(ops.matmul(ops.matmul(matrix, matrix), matrix)).sum() * 0
            sums = ()
            for i in range(len(self.reduce)):
                sums += (self.reduce[i](arrays[i] if i % 3 else arrays[i] + delayed),)
            return sums

    many = Many()

    @mindspore.jit
    def run(arrays, matrix):
        return many(arrays, matrix)

    rank = collectives.world.rank
    matrix = Tensor(np.ones((100, 100), np.float32))
    for step in range(4):
        arrays = tuple(Tensor(np.full(50, 1000 * rank + 10 * i + step, np.float32)) for i in range(len(groups)))
        for i, total in enumerate(run(arrays, matrix)):
            expected = sum(1000 * other + 10 * i + step for other in groups[i])
            np.testing.assert_array_equal(total.asnumpy(), np.full(50, expected, np.float32))


def check_sums_over_sockets(collectives: Collectives, group: tuple[int, ...]) -> None:
    """As between hosts, or without the C++ operators: the bits of sums in shared memory."""
    from mindspore import Tensor

    from mindrlhf.backend.comm.graph_collectives import SocketSum, graph_all_reduce

    for size in (1, 1000, 1 << 17):
        array = np.random.default_rng([collectives.world.rank, size]).normal(size=size).astype(np.float32)
        total = SocketSum(collectives.world, group)(Tensor(array)).asnumpy()
        assert_same_bits(total, graph_all_reduce(collectives, group)(Tensor(array)).asnumpy())
        assert_same_bits(total, collectives.all_reduce_sum(array, group))


def check_all(world: World, groups: list[tuple[int, ...]]) -> int:
    """Runs in each worker; `groups` are gone through in the same order everywhere. Returns how many it was in."""
    collectives = Collectives(world)
    mine = [group for group in groups if world.rank in group]
    for group in mine:
        check_sums(collectives, group)
        check_moves(collectives, group)
        check_maxima(collectives, group)
        check_objects(collectives, group)
        check_ranks(collectives, group)
    check_buckets(collectives, mine[-1])
    check_refusals(collectives)
    if world.device_target == "CPU":
        check_sums_over_sockets(collectives, mine[-1])
    check_tensor_parallel(collectives, mine[0])
    check_tensor_parallel(collectives, (world.rank,))
    check_independent_reductions(collectives, [mine[0], mine[-1]] * 4)
    # Last, because a worker that exits right after a large transfer once took its acknowledgement with it.
    large = np.full(1 << 23, world.rank, np.float32)
    assert collectives.all_reduce_sum(large)[-1] == sum(range(world.size))
    return len(mine)


@pytest.mark.msrun
@pytest.mark.parametrize("library", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sockets", "library"])
def test_two_workers(library):
    """With what CPU uses, and with what Ascend would use."""
    groups = [(0, 1)]
    assert run_workers(2, __file__, "check_all", groups=groups, to_the_end=True, library=library) == [1, 1]


@pytest.mark.slow
@pytest.mark.msrun
def test_four_workers_and_all_groups_of_their_meshes():
    groups = [(0, 1), (2, 3), (1, 2, 3), (0, 1, 2, 3), (0, 2), (1, 3)]
    assert run_workers(4, __file__, "check_all", groups=groups) == [3, 4, 4, 4]


class Counted:
    """Peers that count the bytes they send."""

    def __init__(self, peers):
        self.sent = 0
        self.receive = peers.receive
        self._peers = peers

    def send(self, array, to):
        self.sent += array.nbytes
        self._peers.send(array, to)

    def exchange(self, outgoing, incoming):
        self.sent += sum(array.nbytes for arrays in outgoing.values() for array in arrays)
        self._peers.exchange(outgoing, incoming)


def sent_by_a_broadcast(world, size: int) -> int:
    """Bytes that this rank sends while rank 1 tells the others."""
    counted = Counted(world.channels.gathers)
    told = Collectives(replace(world, channels=replace(world.channels, gathers=counted))).broadcast_object(
        b"x" * size, 1
    )
    assert told == b"x" * size
    return counted.sent


@pytest.mark.msrun
def test_a_broadcast_sends_one_byte_back():
    """An answer is longer than what a socket holds."""
    size = 3 << 20
    sent = run_workers(3, __file__, "sent_by_a_broadcast", size=size)
    assert sent[0] == sent[2] == 1
    assert 2 * size < sent[1] < 2 * size + 200


def test_a_group_of_one_is_the_identity():
    collectives = Collectives(World(rank=0, size=1, device_target="CPU"))
    array = contribution(0, "float32")
    assert_same_bits(collectives.all_reduce_sum(array), array)
    assert_same_bits(collectives.all_reduce_max(array), array)
    assert_same_bits(collectives.all_gather(array, [0]), array[np.newaxis])
    assert collectives.all_gather_object({"a": 1}) == [{"a": 1}]
    assert collectives.broadcast_object(b"\x00\xff", 0) == b"\x00\xff"
    collectives.barrier()
