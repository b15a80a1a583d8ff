"""Messages between ranks: over real sockets between threads of this process, and between workers under msrun."""

import socket
import threading
import time

import numpy as np
import pytest
from ranks import run_ranks, run_threads
from workers import run_workers

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.point_to_point import LibraryPeers, Peers
from mindrlhf.backend.comm.tcp import SocketPeers, connect_peers
from mindrlhf.backend.process.launch import World

LARGE = 8 << 20  # bytes: more than any socket keeps


def message(source: int, to: int, index: int, size: int = 1000) -> np.ndarray:
    """What `source` sends to `to` as its message number `index`."""
    return np.arange(size, dtype=np.float32) + 1000 * source + 100 * to + index


def check_plain(rank: int, peers: Peers, size: int) -> None:
    """Any dtype, shape and memory layout between neighbours, in order."""
    arrays = [
        message(0, 0, 0).reshape(10, 100),
        message(0, 0, 1).reshape(10, 100).T,
        message(0, 0, 2)[::3],
        np.array(7, np.int64),
        np.zeros((0, 4), np.float32),
        np.array([True, False]),
        np.arange(10, dtype=np.float16),
        np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
    ]
    for array in arrays:
        sent = array.copy(order="K")
        peers.send(sent, (rank + 1) % size)
        if sent.flags.writeable:
            sent.fill(0)  # what was sent is a copy
    for array in arrays:
        into = np.empty(array.shape, array.dtype)
        assert peers.receive(into, (rank - 1) % size) is into
        assert into.tobytes() == array.tobytes()


def check_both_send_first(rank: int, peers: Peers, size: int) -> None:
    """Several large messages crossing each other, as in 1F1B, where each stage sends before it receives."""
    others = [other for other in range(size) if other != rank]
    for index in range(3):
        for other in others:
            peers.send(message(rank, other, index, LARGE // 4), other)
    for index in range(3):
        for other in others:
            got = peers.receive(np.empty(LARGE // 4, np.float32), other)
            np.testing.assert_array_equal(got, message(other, rank, index, LARGE // 4))


def check_pipeline(rank: int, peers: Peers, size: int) -> None:
    """A 1F1B schedule: activations down, gradients up."""
    micro_batches, shape = 6, (4, 1000)
    up, down = rank - 1, rank + 1
    warm_up = min(size - 1 - rank, micro_batches)
    kept = []

    def forward(index):
        x = np.full(shape, float(index), np.float32) if up < 0 else peers.receive(np.empty(shape, np.float32), up)
        kept.append(x)
        if down < size:
            peers.send(x + 1, down)

    def backward():
        x = kept.pop(0)
        grad = x if down == size else peers.receive(np.empty(shape, np.float32), down)
        if up >= 0:
            peers.send(grad * 2, up)
        return grad[0, 0]

    grads = []
    for index in range(micro_batches + warm_up):
        if index < micro_batches:
            forward(index)
        if index >= warm_up:
            grads.append(backward())
    expected = [(index + size - 1) * 2.0 ** (size - 1 - rank) for index in range(micro_batches)]
    np.testing.assert_array_equal(grads, expected)


def check_exchange(rank: int, peers: Peers, size: int) -> None:
    """All to all, different numbers of messages of different sizes, after a message that is still being sent."""
    others = [other for other in range(size) if other != rank]
    count = {(source, to): (source + 2 * to) % 4 for source in range(size) for to in range(size)}
    length = [1, LARGE // 4, 0, 1000]
    received = {}

    def fill(source):
        for index in range(count[source, rank]):
            array = np.empty(length[index], np.float32)
            yield array
            received[source, index] = array  # filled by now

    for other in others:
        peers.send(message(rank, other, 99, LARGE // 4), other)
    for other in others:
        got = peers.receive(np.empty(LARGE // 4, np.float32), other)
        np.testing.assert_array_equal(got, message(other, rank, 99, LARGE // 4))
    outgoing = {to: [message(rank, to, index, length[index]) for index in range(count[rank, to])] for to in others}
    peers.exchange(outgoing, {source: fill(source) for source in reversed(others)})
    assert received.keys() == {(source, i) for source in others for i in range(count[source, rank])}
    for (source, index), array in received.items():
        np.testing.assert_array_equal(array, message(source, rank, index, length[index]))
    peers.exchange({}, {})


def check_all(rank: int, peers: Peers, size: int) -> str:
    check_plain(rank, peers, size)
    check_both_send_first(rank, peers, size)
    check_pipeline(rank, peers, size)
    check_exchange(rank, peers, size)
    check_pipeline(rank, peers, size)
    return f"rank {rank} is right"


def check_workers(world: World) -> list[str]:
    """Runs in each worker, with what CPU uses and with what Ascend would use."""
    collectives = Collectives(world)
    peers = collectives.peers()
    assert isinstance(peers, SocketPeers)
    assert peers is Collectives(world).peers()
    library = LibraryPeers(world.rank, world.size)
    return [check_all(world.rank, each, world.size) for each in (peers, library)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_between_threads(size):
    assert run_ranks(size, lambda rank, peers: check_all(rank, peers, size)) == [
        f"rank {rank} is right" for rank in range(size)
    ]


@pytest.mark.msrun
def test_two_workers():
    assert run_workers(2, __file__, "check_workers") == [[f"rank {rank} is right"] * 2 for rank in range(2)]


@pytest.mark.slow
@pytest.mark.msrun
def test_four_workers():
    assert run_workers(4, __file__, "check_workers") == [[f"rank {rank} is right"] * 2 for rank in range(4)]


def test_a_rank_that_is_gone_is_named():
    def run(rank, peers):
        if rank == 0:
            return
        with pytest.raises(ConnectionError, match="rank 0 is gone"):
            peers.receive(np.zeros(1), 0)
        with pytest.raises(ConnectionError, match="rank 0 is gone"):
            peers.exchange({}, {0: [np.zeros(1)]})
        with pytest.raises(ConnectionError, match="rank 0 is gone"):
            peers.send(np.zeros(1), 0)

    run_ranks(2, run)


def test_a_rank_that_goes_while_much_is_on_the_way_to_it_is_named():
    sent = threading.Event()

    def run(rank, peers):
        if rank == 0:
            sent.wait()
            return
        peers.send(np.zeros(LARGE), 0)
        sent.set()
        with pytest.raises(ConnectionError, match="rank 0 is gone"):
            peers.exchange({0: [np.zeros(1)]}, {})

    run_ranks(2, run)


def test_whoever_watches_learns_which_rank_is_gone_whatever_it_does():
    gone, may_end = [], threading.Event()

    def run(rank, peers):
        if rank == 1:
            peers.send(np.zeros(3), 0)  # nobody has received this yet
            return
        peers.watch(lambda other: (gone.append((rank, other)), len(gone) == 2 and may_end.set()))
        assert may_end.wait(10)

    run_ranks(3, run)
    assert sorted(gone) == [(0, 1), (2, 1)]


def test_at_the_end_ranks_may_go():
    gone, ended = [], threading.Barrier(2)

    def run(rank, peers):
        peers.watch(gone.append)
        peers.stop_watching()
        ended.wait()
        if rank == 0:
            time.sleep(0.2)

    run_ranks(2, run)
    assert gone == []


def test_ranks_out_of_step_find_out():
    def run(rank, peers):
        if rank == 0:
            peers.send(np.zeros(3, np.float32), 1)
        else:
            with pytest.raises(RuntimeError, match="rank 0 sent a message of 12 bytes where one of 16 was due"):
                peers.receive(np.zeros(4, np.float32), 0)

    run_ranks(2, run)


def test_a_message_lies_in_one_piece():
    def run(rank, peers):
        with pytest.raises(ValueError, match="one piece"):
            peers.receive(np.zeros((2, 2)).T, 1 - rank)

    run_ranks(2, run)


def test_strangers_that_call_are_left_outside(monkeypatch):
    """Three ranks connect while somebody else calls: one that says nothing right, and one that hangs up."""
    monkeypatch.setenv("MS_SCHED_HOST", "127.0.0.1")
    monkeypatch.setenv("MS_SCHED_PORT", "9999")
    size = 3
    addresses, all_there = [None] * size, threading.Barrier(size)

    def connect(rank):
        def all_gather_object(value):
            addresses[rank] = value
            if rank == 0:
                strangers = [socket.create_connection(value[:2]) for _ in range(2)]
                strangers[0].sendall(bytes(100))
                strangers[1].close()
            all_there.wait()
            return addresses

        return check_all(rank, connect_peers(rank, all_gather_object), size)

    assert run_threads(size, connect) == [f"rank {rank} is right" for rank in range(size)]


def test_one_process_has_nobody_to_talk_to():
    peers = Collectives(World(rank=0, size=1, device_target="CPU")).peers()
    peers.exchange({}, {})
