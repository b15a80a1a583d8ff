"""Sums in shared memory between real processes, against NumPy."""

import ctypes
import os
import signal
import threading

import numpy as np
import pytest
from processes import SocketCollectives, run_processes
from slow_cases import few_of

from mindrlhf.backend.comm import shared_memory
from mindrlhf.backend.native import library
from mindrlhf.backend.process.launch import World

PIECE = 1 << 16
SIZES = (1, 7, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5, 2 * PIECE, 1000)
GONE = 7  # exit code of a rank that misses another one

pytestmark = pytest.mark.skipif(library().path is None, reason="the fused operators cannot be built here")


def contribution(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, size]).normal(size=size).astype(np.float32)


def shared_sum(array: np.ndarray, group: tuple[int, ...]) -> np.ndarray:
    """Call the operator as MindSpore does. Raises RuntimeError with its return code."""
    ranks, out = np.array(group, np.int32), np.empty_like(array)
    pointers = (ctypes.c_void_p * 3)(*(one.ctypes.data for one in (array, ranks, out)))
    shapes = [(ctypes.c_int64 * 1)(one.size) for one in (array, ranks, out)]
    shapes = (ctypes.POINTER(ctypes.c_int64) * 3)(*(ctypes.cast(one, ctypes.POINTER(ctypes.c_int64)) for one in shapes))
    code = ctypes.CDLL(str(library().path)).shared_sum(
        3, pointers, (ctypes.c_int * 3)(1, 1, 1), shapes, None, None, None
    )
    if code:
        raise RuntimeError(code)
    return out


def join(world: World, *groups: tuple[int, ...]) -> None:
    shared_memory.Collectives = SocketCollectives
    for group in groups:
        assert shared_memory.share_memory(world, group)


def sums(world: World, groups: list[tuple[int, ...]]) -> None:
    """Every size, twice, over all groups of this rank in turn."""
    own = [group for group in groups if world.rank in group]
    join(world, *own)
    for size in SIZES * 2:
        for group in own:
            expected = contribution(group[0], size)
            for rank in group[1:]:
                expected = expected + contribution(rank, size)
            array = contribution(world.rank, size)
            assert shared_sum(array, group).tobytes() == expected.tobytes()
            np.testing.assert_array_equal(array, contribution(world.rank, size))


@pytest.mark.parametrize(
    ("size", "groups"),
    few_of([(3, [(0, 1, 2), (0, 2)])], [(2, [(0, 1)]), (4, [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)])]),
)
def test_sums_in_the_order_of_the_ranks(size, groups):
    """Bit for bit, also with more processes than cores."""
    assert run_processes(size, __file__, "sums", groups=groups) == [(0, None)] * size


def one_is_killed(world: World) -> None:
    """The first rank ends where the other one waits for it, asleep; a thread notices it, as a job's does."""
    join(world, (0, 1))
    if world.rank == 1:
        connection = SocketCollectives.peers._sockets[0]
        threading.Thread(target=lambda: connection.recv(1) or os._exit(GONE), daemon=True).start()
    shared_sum(np.ones(3, np.float32), (0, 1))
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    shared_sum(np.ones(3, np.float32), (0, 1))


def test_a_rank_that_waits_for_one_that_is_gone_can_be_ended():
    assert run_processes(2, __file__, "one_is_killed") == [(-signal.SIGKILL, None), (GONE, None)]


def out_of_step(world: World) -> int:
    join(world, (0, 1))
    with pytest.raises(RuntimeError) as error:
        shared_sum(np.ones(10 + world.rank, np.float32), (0, 1))
    return error.value.args[0]


def test_ranks_out_of_step_find_out():
    assert run_processes(2, __file__, "out_of_step") == [(0, 2)] * 2


def one_is_refused(world: World, where: str) -> tuple[bool, int]:
    """`where` fails on one rank; returns whether memory is shared, and the number of open files that are left."""
    shared_memory.Collectives = SocketCollectives

    def refuse(*_):
        raise OSError

    before = len(os.listdir("/proc/self/fd"))
    if where == "memfd_create":
        os.memfd_create = refuse
    elif world.rank == 1:
        os.open = refuse
    return shared_memory.share_memory(world, (0, 1)), len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize("where", ["memfd_create", "open"])
def test_where_one_rank_is_refused_none_shares(where):
    assert run_processes(2, __file__, "one_is_refused", where=where) == [(0, (False, 0))] * 2


def test_ranks_of_several_hosts_do_not_share():
    assert not shared_memory.share_memory(World(0, 3, "CPU", (0, 0, 2)), (0, 1, 2))
    assert not shared_memory.share_memory(World(0, 2, "CPU"), (0, 1))  # where that is not known
