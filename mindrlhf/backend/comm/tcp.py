"""Messages between ranks over TCP, on one host or several.

Large ones between ranks of one host go through memory (`comm.ring`). Each message begins with its length, so that two
ranks that run different steps notice it. A rank that is gone is noticed at once if its process has ended, and within
half a minute if its host cannot be reached.
"""

import hmac
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindrlhf.backend.comm.connection import fill, keep_alive
from mindrlhf.backend.comm.patience import MESSAGE_LIMIT_S
from mindrlhf.backend.comm.point_to_point import Messages, PeerGone, Peers, bytes_of
from mindrlhf.backend.comm.ring import LEAST_BYTES_ALONE, LEAST_BYTES_IN_A_ROW, IncomingRing, OutgoingRing
from mindrlhf.errors import UserError

_LENGTH = struct.Struct("!q")
_HELLO = struct.Struct("!iB32s")  # the caller's rank, the channel, and the secret of the rank that is called
_USES = range(3)  # a connection to every rank for each field of `Channels`
_CREDITS = range(3, 6)  # and to ranks of this host another one for each
_JOINED_BYTES = 1 << 16  # of a message that one call sends with its length: one more copy costs less than one more call
_CONNECT_TIMEOUT_S = 60
_HELLO_TIMEOUT_S = 5


@dataclass(frozen=True)
class Member:
    """A rank of a job as others reach it.

    address, port: of its listening socket; secret: 32 letters that a caller has to know; host: name of its host, equal
    for ranks that can share memory, or None.
    """

    address: str
    port: int
    secret: str
    host: str | None


class SocketPeers:
    """Peers over one socket to each other rank; `connect_channels` makes them.

    credits: a second socket to each rank of this host, for messages through memory (`comm.ring`).
    """

    def __init__(self, sockets: Mapping[int, socket.socket], credits: Mapping[int, socket.socket] | None = None):
        self._sockets = sockets
        self._senders = {rank: ThreadPoolExecutor(1, f"to rank {rank}") for rank in sockets}
        self._sending: dict[int, Future] = {}  # the last send to each rank
        near = [(sockets[rank], credit, rank) for rank, credit in (credits or {}).items()]
        self._outgoing = {rank: OutgoingRing(channel, credit, rank) for channel, credit, rank in near}
        self._incoming = {rank: IncomingRing(channel, credit, rank) for channel, credit, rank in near}

    def send(self, array: np.ndarray, to: int) -> None:
        """Send like `Peers.send`; a thread sends the part that would block."""
        if self._by_memory(array, to, in_a_row=False):
            self._start(to, self._send_all, [np.array(array, order="C")], to, False)
            return
        rest = memoryview(b"".join(_message(np.ascontiguousarray(array))))
        before = self._sending.get(to)
        if before is None or before.done():
            try:
                with suppress(BlockingIOError):
                    rest = rest[self._sockets[to].send(rest, socket.MSG_DONTWAIT) :]
            except OSError as error:
                raise PeerGone(to) from error
        if rest:
            self._start(to, self._sockets[to].sendall, rest)

    def receive(self, into: np.ndarray, source: int) -> np.ndarray:
        self._receive(into, source, in_a_row=False)
        return into

    def exchange(self, outgoing: Messages, incoming: Messages) -> None:
        for to, arrays in outgoing.items():
            self._start(to, self._send_all, arrays, to, True)
        for source, arrays in incoming.items():
            for array in arrays:
                self._receive(array, source, in_a_row=True)
        for to in outgoing:
            self._sending[to].result()

    def _by_memory(self, array: np.ndarray, other: int, in_a_row: bool) -> bool:
        """Return whether a message goes through memory; both ranks know what decides that."""
        least = LEAST_BYTES_IN_A_ROW if in_a_row else LEAST_BYTES_ALONE
        return array.nbytes >= least and other in self._outgoing

    def _send_all(self, arrays: Iterable[np.ndarray], to: int, in_a_row: bool) -> None:
        for array in arrays:
            message = _message(array)
            if self._by_memory(array, to, in_a_row):
                length, content = message
                self._sockets[to].sendall(length)
                self._outgoing[to].send(content)
            elif array.nbytes <= _JOINED_BYTES:
                self._sockets[to].sendall(b"".join(message))
            else:
                for part in message:
                    self._sockets[to].sendall(part)

    def _receive(self, into: np.ndarray, source: int, in_a_row: bool) -> None:
        content = _expect(into, self._sockets[source], source)
        if self._by_memory(into, source, in_a_row):
            self._incoming[source].receive(content, in_a_row)
        else:
            fill(content, self._sockets[source], source)

    def _start(self, to: int, send: Callable[..., None], *arguments: Any) -> None:
        """Call `send` on a thread, after all earlier messages to the rank."""
        before = self._sending.get(to)

        def run() -> None:
            if before:
                before.result()  # raises the error that broke the connection
            try:
                send(*arguments)
            except PeerGone:
                raise
            except OSError as error:
                raise PeerGone(to) from error

        self._sending[to] = self._senders[to].submit(run)


def _message(array: np.ndarray) -> list[memoryview]:
    return [memoryview(_LENGTH.pack(array.nbytes)), bytes_of(array)]


def _expect(into: np.ndarray, connection: socket.socket, source: int | str) -> memoryview:
    """Read the length of the next message, and return the memory to fill.

    Raises RuntimeError if the length is not the array's.
    """
    content = bytes_of(into)
    length = bytearray(_LENGTH.size)
    fill(memoryview(length), connection, source)
    if _LENGTH.unpack(length)[0] != into.nbytes:
        raise RuntimeError(
            f"rank {source} sent a message of {_LENGTH.unpack(length)[0]} bytes where one of {into.nbytes} "
            "was due: the two ranks do not run the same steps"
        )
    return content


@dataclass(frozen=True)
class Channels:
    """Connections of one rank to all others.

    Each use has a set of its own, so that messages of two uses never mix. messages: of pipelines and reshard; gathers:
    of `Collectives`; sums: of compiled graphs.
    """

    messages: Peers
    gathers: Peers
    sums: Peers


NO_CHANNELS = Channels(SocketPeers({}), SocketPeers({}), SocketPeers({}))


def connect_channels(rank: int, members: Sequence[Member], server: socket.socket) -> Channels:
    """Connect with all other ranks; `server` listens at this rank's own address.

    All ranks listen before any of them calls this: a rank calls the lower ranks, and calls of higher ranks wait to be
    accepted. Raises UserError if one does not call in time.
    """
    expected = {
        (other, kind) for other in range(rank + 1, len(members)) for kind in _kinds(members[rank], members[other])
    }
    sockets = {
        (other, kind): _call(rank, kind, members[other])
        for other in range(rank)
        for kind in _kinds(members[rank], members[other])
    }
    server.settimeout(_CONNECT_TIMEOUT_S)
    while expected - sockets.keys():
        try:
            caller, connection = _answer(server, members[rank].secret)
        except TimeoutError:
            missing = sorted({other for other, _ in expected - sockets.keys()})
            raise UserError(
                f"rank {rank}: not connected within {_CONNECT_TIMEOUT_S} s with rank "
                f"{', '.join(map(str, missing))}; see the log of each, and whether its host reaches this one."
            ) from None
        if caller in expected:
            sockets[caller] = connection
    for connection in sockets.values():
        connection.settimeout(MESSAGE_LIMIT_S)
        keep_alive(connection)
    by_kind: dict[int, dict[int, socket.socket]] = {kind: {} for kind in (*_USES, *_CREDITS)}
    for (other, kind), connection in sockets.items():
        by_kind[kind][other] = connection
    made = [SocketPeers(by_kind[use], by_kind[credit]) for use, credit in zip(_USES, _CREDITS, strict=True)]
    return Channels(messages=made[0], gathers=made[1], sums=made[2])


def _kinds(one: Member, other: Member) -> Sequence[int]:
    """Return the kinds of connections between two ranks."""
    return [*_USES, *_CREDITS] if one.host is not None and one.host == other.host else _USES


def _call(rank: int, kind: int, member: Member) -> socket.socket:
    connection = socket.create_connection((member.address, member.port), timeout=_CONNECT_TIMEOUT_S)
    hello = _HELLO.pack(rank, kind, member.secret.encode())
    connection.sendall(b"".join(_message(np.frombuffer(hello, np.uint8))))
    return connection


def _answer(server: socket.socket, secret: str) -> tuple[tuple[int, int] | None, socket.socket]:
    """Accept a connection.

    Returns the caller's rank and channel (None for a stranger), and the connection.
    """
    connection, (host, _) = server.accept()
    connection.settimeout(_HELLO_TIMEOUT_S)
    hello = np.empty(_HELLO.size, np.uint8)
    with suppress(OSError, RuntimeError):
        fill(_expect(hello, connection, host), connection, host)
        rank, kind, given = _HELLO.unpack(hello)
        if hmac.compare_digest(given, secret.encode()):
            return (rank, kind), connection
    connection.close()
    return None, connection
