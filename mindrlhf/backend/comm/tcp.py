"""Messages between ranks over TCP, on one host or several.

Each message begins with its length, so that two ranks that run different steps notice it. A rank that is gone is
noticed at once if its process has ended, and within half a minute if its host cannot be reached.
"""

import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np

from mindrlhf.backend.comm.point_to_point import Messages, PeerGone, bytes_of
from mindrlhf.errors import UserError

_LENGTH = struct.Struct("!q")
_HELLO = struct.Struct("!i16s")  # the caller's rank, and the secret of the rank that is called
_CONNECT_TIMEOUT_S = 60
_HELLO_TIMEOUT_S = 5


class SocketPeers:
    """Peers over one socket to each other rank; `connect_peers` makes them."""

    def __init__(self, sockets: Mapping[int, socket.socket]):
        self._sockets = sockets
        self._senders = {rank: ThreadPoolExecutor(1, f"to rank {rank}") for rank in sockets}
        self._sending: dict[int, Future] = {}  # the last send to each rank
        self._watching = True

    def watch(self, on_gone: Callable[[int], None]) -> None:
        """Call `on_gone(rank)` from a thread when the first other rank is gone."""
        ranks = {connection.fileno(): rank for rank, connection in self._sockets.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)  # and errors, which poll always reports

        def run() -> None:
            gone = poll.poll()
            if self._watching:
                on_gone(ranks[gone[0][0]])

        threading.Thread(target=run, name="watch", daemon=True).start()

    def stop_watching(self) -> None:
        """Stop watching; all ranks call it before any of them ends."""
        self._watching = False

    def send(self, array: np.ndarray, to: int) -> None:
        """Send like `Peers.send`; a thread sends the part that would block."""
        rest, before = memoryview(b"".join(_message(np.ascontiguousarray(array)))), self._sending.get(to)
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
    content, length = bytes_of(into), bytearray(_LENGTH.size)
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
        except OSError as error:
            raise PeerGone(source) from error
        if count == 0:
            raise PeerGone(source)
        rest = rest[count:]


def connect_peers(rank: int, gather: Callable[[Any], list[Any]]) -> SocketPeers:
    """Connect with all other ranks; `gather` collects every rank's picklable value."""
    secret = secrets.token_bytes(16)
    with socket.create_server((_own_address(), 0), backlog=1024) as server:
        addresses = gather((*server.getsockname(), secret))
        # All ranks listen now: this rank calls the lower ranks, and calls of higher ranks wait to be accepted.
        sockets = {other: _call(rank, *addresses[other]) for other in range(rank)}
        server.settimeout(_CONNECT_TIMEOUT_S)
        while len(sockets) < len(addresses) - 1:
            try:
                caller, connection = _answer(server, secret)
            except TimeoutError:
                missing = sorted(set(range(rank + 1, len(addresses))) - sockets.keys())
                raise UserError(
                    f"rank {rank}: not connected within {_CONNECT_TIMEOUT_S} s with rank "
                    f"{', '.join(map(str, missing))}; see the log of each, and whether its host reaches this one."
                ) from None
            if caller is not None:
                sockets[caller] = connection
    for connection in sockets.values():
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes sends nothing. After 10 s of silence it is probed, and given up after three probes:
        # before MindSpore's scheduler gives up (30 s) and ends ranks, which others would report as the first to fail.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return SocketPeers(sockets)


def _own_address() -> str:
    """Find this host's address on the network of msrun's scheduler."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it finds the route and sends nothing
        probe.connect((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])))
        return probe.getsockname()[0]


def _call(rank: int, host: str, port: int, secret: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    connection.sendall(b"".join(_message(np.frombuffer(_HELLO.pack(rank, secret), np.uint8))))
    return connection


def _answer(server: socket.socket, secret: bytes) -> tuple[int | None, socket.socket]:
    """Accept a connection; returns the caller's rank (None for a stranger) and it."""
    connection, (host, _) = server.accept()
    connection.settimeout(_HELLO_TIMEOUT_S)
    with suppress(ConnectionError, RuntimeError):
        rank, given = _HELLO.unpack(_receive(np.empty(_HELLO.size, np.uint8), connection, host))
        if hmac.compare_digest(given, secret):
            return rank, connection
    connection.close()
    return None, connection
