"""Messages between ranks: over real sockets between threads of this process, and between workers under msrun."""

import socket
import struct
import threading

import numpy as np
import pytest
from ranks import run_ranks, run_threads
from workers import run_workers

from mindrlhf.backend.comm import ring, tcp
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.point_to_point import LibraryPeers, Peers
from mindrlhf.backend.comm.tcp import SocketPeers
from mindrlhf.backend.process.launch import World
from mindrlhf.errors import UserError

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


def check_workers(world: World) -> str:
    peers = Collectives(world).peers()
    assert isinstance(peers, LibraryPeers if world.device_target == "Ascend" else SocketPeers)
    assert peers is Collectives(world).peers()
    return check_all(world.rank, peers, world.size)


@pytest.mark.parametrize(("size", "one_host"), [(2, False), (3, False), (4, False), (2, True), (3, True)])
def test_messages_between_threads(size, one_host):
    assert run_ranks(size, lambda rank, peers: check_all(rank, peers, size), one_host) == [
        f"rank {rank} is right" for rank in range(size)
    ]


class CountedSocket:
    """A socket that counts what is sent."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self.sent = 0

    def sendall(self, content: memoryview) -> None:
        self._connection.sendall(content)
        self.sent += len(content)

    def __getattr__(self, name: str):
        return getattr(self._connection, name)


def bytes_over_sockets(size: int = LARGE // 8, one_by_one: bool = False) -> int:
    """Bytes that went over sockets while two ranks of one host exchanged two messages each, which arrived.

    size: numbers of a message. one_by_one: they are sent and received, not exchanged.
    """
    channels, credits = (list(map(CountedSocket, socket.socketpair())) for _ in range(2))

    def run(rank):
        other = 1 - rank
        peers = SocketPeers({other: channels[rank]}, {other: credits[rank]})
        for index in range(2):
            into = np.empty(size, np.float32)
            sent = message(rank, other, index, size)
            if one_by_one:
                peers.send(sent, other)
                peers.receive(into, other)
            else:
                peers.exchange({other: [sent]}, {other: [into]})
            np.testing.assert_array_equal(into, message(other, rank, index, size))

    run_threads(2, run)
    return sum(one.sent for one in (*channels, *credits))


def test_ranks_of_one_host_send_large_messages_through_memory():
    assert bytes_over_sockets() < 1000


@pytest.mark.parametrize(("one_by_one", "least"), [(True, ring.LEAST_BYTES_ALONE), (False, ring.LEAST_BYTES_IN_A_ROW)])
def test_what_is_large_enough_for_memory(one_by_one, least):
    """Less if many messages follow each other; what is odd at the end of memory arrives as well."""
    assert bytes_over_sockets(least // 4 + 3, one_by_one) < 1000
    assert bytes_over_sockets(least // 4 - 1, one_by_one) > 2 * least


@pytest.mark.parametrize("refused", ["memfd_create", "posix_fallocate", "open"])
def test_without_memory_in_common_sockets_carry_everything(monkeypatch, refused):
    def refuse(*arguments):
        raise PermissionError(refused)

    monkeypatch.setattr(ring.os, refused, refuse)
    assert bytes_over_sockets() > 2 * LARGE


def test_memory_that_cannot_be_mapped(monkeypatch):
    """By the sender, by the receiver: what ranks did not map is not used."""
    real, calls = ring.mmap.mmap, []

    def refuse_at_first(*arguments):
        calls.append(arguments)
        if len(calls) <= 2:
            raise OSError("no memory")
        return real(*arguments)

    monkeypatch.setattr(ring.mmap, "mmap", refuse_at_first)
    assert bytes_over_sockets() > LARGE
    assert calls


@pytest.mark.slow
@pytest.mark.msrun
@pytest.mark.parametrize(("size", "library"), [(2, True), (4, True), (4, False)])
def test_workers(size, library):
    """With what CPU uses, and with what Ascend would use."""
    expected = [f"rank {rank} is right" for rank in range(size)]
    assert run_workers(size, __file__, "check_workers", library=library) == expected


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


@pytest.mark.parametrize("one_host", [False, True])
def test_a_rank_that_goes_while_much_is_on_the_way_to_it_is_named(one_host):
    sent = threading.Event()

    def run(rank, peers):
        if rank == 0:
            sent.wait()
            return
        peers.send(np.zeros(LARGE), 0)
        sent.set()
        with pytest.raises(ConnectionError, match="rank 0 is gone"):
            peers.exchange({0: [np.zeros(1)]}, {})

    run_ranks(2, run, one_host)


def test_a_rank_that_goes_after_it_sent_through_memory_is_named_when_more_is_due():
    """What it sent arrives."""

    def run(rank, peers):
        if rank == 0:
            peers.exchange({1: [message(0, 1, 0, LARGE // 4)]}, {1: [np.empty(1)]})
            return
        first = np.empty(LARGE // 4, np.float32)
        with pytest.raises(ConnectionError, match="rank 0 is gone"):
            peers.exchange({0: [np.zeros(1)]}, {0: [first, np.empty(LARGE // 4, np.float32)]})
        np.testing.assert_array_equal(first, message(0, 1, 0, LARGE // 4))

    run_ranks(2, run, one_host=True)


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


def test_a_rank_that_sends_nothing_is_not_waited_for_for_ever():
    ends = socket.socketpair()
    ends[0].settimeout(0.2)
    with pytest.raises(UserError, match=r"rank 1 sent nothing for 0\.2 s where a message was due"):
        SocketPeers({1: ends[0]}).receive(np.zeros(1), 1)


def connect_all(size: int, strangers, hosts: str) -> list[tcp.Channels]:
    """Channels of each rank; `strangers(member)` is called with each one's address before ranks call each other.

    hosts: a letter for each rank's.
    """
    servers = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(size)]
    members = [tcp.Member(*server.getsockname(), f"{rank:032d}", hosts[rank]) for rank, server in enumerate(servers)]
    for member in members:
        strangers(member)
    return run_threads(size, lambda rank: tcp.connect_channels(rank, members, servers[rank]))


def test_strangers_that_call_are_left_outside():
    """Three ranks connect while somebody else calls: with wrong bytes, without any, and with a wrong secret."""
    calls = []

    def call(member):
        for content in (bytes(100), b"", tcp._HELLO.pack(2, 0, b"x" * 32)):
            calls.append(socket.create_connection((member.address, member.port)))
            calls[-1].sendall(struct.pack("!q", len(content)) + content)
            if not content:
                calls[-1].close()

    channels = connect_all(3, call, hosts="aba")
    for kind in ("messages", "gathers", "sums"):
        results = run_threads(3, lambda rank: check_all(rank, getattr(channels[rank], kind), 3))  # noqa: B023
        assert results == [f"rank {rank} is right" for rank in range(3)]


def test_one_process_has_nobody_to_talk_to():
    peers = Collectives(World(rank=0, size=1, device_target="CPU")).peers()
    peers.exchange({}, {})
