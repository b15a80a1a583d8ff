"""Messages between ranks over TCP, on one host or several.

Each message begins with its length, so that two ranks that run different steps notice it. A rank that is gone is
noticed at once if its process has ended, and within half a minute if its host cannot be reached.
"""

import hmac
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mindrlhf.backend.comm.patience import MESSAGE_LIMIT_S
from mindrlhf.backend.comm.point_to_point import Messages, PeerGone, Peers, bytes_of
from mindrlhf.errors import UserError

_LENGTH = struct.Struct("!q")
_HELLO = struct.Struct("!iB32s")  # the caller's rank, the channel, and the secret of the rank that is called
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
    """Peers over one socket to each other rank; `connect_channels` makes them."""

    def __init__(self, sockets: Mapping[int, socket.socket]):
        self._sockets = sockets
        self._senders = {rank: ThreadPoolExecutor(1, f"to rank {rank}") for rank in sockets}
        self._sending: dict[int, Future] = {}  # the last send to each rank

    def send(self, array: np.ndarray, to: int) -> None:
        """Send like `Peers.send`; a thread sends the part that would block."""
        rest = memoryview(b"".join(_message(np.ascontiguousarray(array))))
        before = self._sending.get(to)
        if before is None or before.done():
            try:
                with suppress(BlockingIOError):
                    rest = rest[self._sockets[to].send(rest, socket.MSG_DONTWAIT) :]
            except OSError as error:
                raise PeerGone(to) from error
        if rest:
            self._start([rest], to)

    def receive(self, into: np.ndarray, source: int) -> np.ndarray:
        return _receive(into, self._sockets[source], source)

    def exchange(self, outgoing: Messages, incoming: Messages) -> None:
        for to, arrays in outgoing.items():
            self._start(chain.from_iterable(map(_message, arrays)), to)
        for source, arrays in incoming.items():
            for array in arrays:
                self.receive(array, source)
        for to in outgoing:
            self._sending[to].result()

    def _start(self, content: Iterable[memoryview], to: int) -> None:
        """Send from a thread, after all earlier messages to the rank."""
        before = self._sending.get(to)

        def run() -> None:
            if before:
                before.result()  # raises the error that broke the connection
            try:
                for piece in content:
                    self._sockets[to].sendall(piece)
            except OSError as error:
                raise PeerGone(to) from error

        self._sending[to] = self._senders[to].submit(run)


def _message(array: np.ndarray) -> list[memoryview]:
    return [memoryview(_LENGTH.pack(array.nbytes)), bytes_of(array)]


def _receive(into: np.ndarray, connection: socket.socket, source: int | str) -> np.ndarray:
    """Fill an array with the next message; raises RuntimeError if its length differs."""
    content = bytes_of(into)
    length = bytearray(_LENGTH.size)
    _fill(memoryview(length), connection, source)
    if _LENGTH.unpack(length)[0] != into.nbytes:
        raise RuntimeError(
            f"rank {source} sent a message of {_LENGTH.unpack(length)[0]} bytes where one of {into.nbytes} "
            "was due: the two ranks do not run the same steps"
        )
    _fill(content, connection, source)
    return into


def _fill(rest: memoryview, connection: socket.socket, source: int | str) -> None:
    while rest:
        try:
            count = connection.recv_into(rest)
        except TimeoutError:
            raise UserError(f"rank {source} sent nothing for {MESSAGE_LIMIT_S} s where a message was due") from None
        except OSError as error:
            raise PeerGone(source) from error
        if count == 0:
            raise PeerGone(source)
        rest = rest[count:]


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
    kinds = range(3)
    sockets = {(other, kind): _call(rank, kind, members[other]) for other in range(rank) for kind in kinds}
    server.settimeout(_CONNECT_TIMEOUT_S)
    while len(sockets) < (len(members) - 1) * len(kinds):
        try:
            caller, connection = _answer(server, members[rank].secret)
        except TimeoutError:
            missing = sorted(set(range(rank + 1, len(members))) - {other for other, _ in sockets})
            raise UserError(
                f"rank {rank}: not connected within {_CONNECT_TIMEOUT_S} s with rank "
                f"{', '.join(map(str, missing))}; see the log of each, and whether its host reaches this one."
            ) from None
        if caller is not None:
            sockets[caller] = connection
    for connection in sockets.values():
        connection.settimeout(MESSAGE_LIMIT_S)
        keep_alive(connection)
    by_kind = [{other: sockets[other, kind] for other, same in sockets if same == kind} for kind in kinds]
    return Channels(messages=SocketPeers(by_kind[0]), gathers=SocketPeers(by_kind[1]), sums=SocketPeers(by_kind[2]))


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and notice that the other host is gone.

    That takes half a minute at the most.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanishes sends nothing. After 10 s of silence it is probed, and given up after three probes.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


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
    with suppress(OSError, RuntimeError):
        rank, kind, given = _HELLO.unpack(_receive(np.empty(_HELLO.size, np.uint8), connection, host))
        if hmac.compare_digest(given, secret.encode()):
            return (rank, kind), connection
    connection.close()
    return None, connection
