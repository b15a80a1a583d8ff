"""Messages between ranks over TCP, from memory to memory without copies.

The ranks may be on one host or several.
Each message has its length before it, so that two ranks that have lost step find out. A rank that is gone is noticed
at once when its process has ended, within half a minute when its host cannot be reached: by those who wait for a
message from it, and by those who watch.
"""

import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mindrlhf.backend.comm.point_to_point import Messages, PeerGone, bytes_of
from mindrlhf.errors import UserError

_LENGTH = struct.Struct("!q")
_HELLO = struct.Struct("!i16s")  # the rank that calls, and the secret of the one that is called
_CONNECT_TIMEOUT_S = 60
_HELLO_TIMEOUT_S = 5


class SocketPeers:
    """Peers over one socket to each other rank; `connect_peers` makes them."""

    def __init__(self, sockets: Mapping[int, socket.socket]):
        self._sockets = sockets
        self._outboxes = {rank: _Outbox(connection, rank) for rank, connection in sockets.items()}
        self._watching = True

    def watch(self, on_gone: Callable[[int], None]) -> None:
        """Call `on_gone(rank)`, from a thread, once another rank is gone.

        It is called for the first of them only.
        """
        threading.Thread(target=self._watch, args=(on_gone,), name="watch", daemon=True).start()

    def stop_watching(self) -> None:
        """Stop watching; all ranks call it before any of them ends."""
        self._watching = False

    def _watch(self, on_gone: Callable[[int], None]) -> None:
        ranks = {connection.fileno(): rank for rank, connection in self._sockets.items()}
        poll = select.poll()
        for descriptor in ranks:
            poll.register(descriptor, select.POLLRDHUP)  # and its errors, which need not be asked for
        gone = poll.poll()
        if self._watching:
            on_gone(ranks[gone[0][0]])

    def send(self, array: np.ndarray, to: int) -> None:
        """Send like `Peers.send`; a thread sends the rest that the network refuses.

        The rest is copied.
        """
        self._outboxes[to].put(_message(np.ascontiguousarray(array)))

    def receive(self, into: np.ndarray, source: int) -> np.ndarray:
        for _ in _receive([into], self._sockets[source], source):
            pass
        return into

    def exchange(self, outgoing: Messages, incoming: Messages) -> None:
        with selectors.DefaultSelector() as selector:
            for rank in outgoing.keys() | incoming.keys():
                connection, steps = self._sockets[rank], {}
                if rank in outgoing:
                    self._outboxes[rank].flush()
                    steps[selectors.EVENT_WRITE] = _send(outgoing[rank], connection, rank)
                if rank in incoming:
                    steps[selectors.EVENT_READ] = _receive(incoming[rank], connection, rank, socket.MSG_DONTWAIT)
                selector.register(connection, sum(steps), steps)
                _advance_ready(selector, selector.get_key(connection), sum(steps))
            while selector.get_map():
                for key, ready in selector.select():
                    _advance_ready(selector, key, ready)


def _advance_ready(selector: selectors.BaseSelector, key: selectors.SelectorKey, ready: int) -> None:
    """Advance each connection's generators, and wait only for unfinished ones."""
    steps = key.data
    for event in [event for event in steps if event & ready]:
        if next(steps[event], "finished") == "finished":
            del steps[event]
    if not steps:
        selector.unregister(key.fileobj)
    elif sum(steps) != key.events:
        selector.modify(key.fileobj, sum(steps), steps)


def _send(arrays: Iterable[np.ndarray], connection: socket.socket, to: int) -> Iterator[None]:
    """Send arrays in order without waiting; yields before each attempt."""
    for array in arrays:
        rest = _message(array)
        while rest:
            yield
            _send_some(rest, connection, to)


def _receive(arrays: Iterable[np.ndarray], connection: socket.socket, source: int, flags: int = 0) -> Iterator[None]:
    """Fill arrays in order; yields before each attempt.

    An attempt waits unless `flags` forbid it.
    """
    for array in arrays:
        length = bytearray(_LENGTH.size)
        rest = [view for view in (memoryview(length), bytes_of(array)) if view.nbytes]
        received = 0
        while rest:
            yield
            try:
                count = connection.recvmsg_into(rest, 0, flags)[0]
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerGone(source) from error
            if count == 0:
                raise PeerGone(source)
            if received < _LENGTH.size <= received + count and _LENGTH.unpack(length)[0] != array.nbytes:
                raise RuntimeError(
                    f"rank {source} sent a message of {_LENGTH.unpack(length)[0]} bytes where one of {array.nbytes} "
                    "was due: the two ranks do not run the same steps"
                )
            received += count
            _drop(rest, count)


class _Outbox:
    """Unsent rest of one connection's messages, with a thread that sends it."""

    def __init__(self, connection: socket.socket, to: int):
        self._connection, self._to = connection, to
        self._waiting: deque[bytes] = deque()  # the first one may be half sent
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failure: PeerGone | None = None

    def put(self, message: list[memoryview]) -> None:
        with self._changed:
            if self._failure:
                raise self._failure
            if not self._waiting:
                _send_some(message, self._connection, self._to)
            if not message:
                return
            self._waiting.append(b"".join(message))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"to rank {self._to}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until nothing is left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting)
            if self._failure:
                raise self._failure

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                message = self._waiting[0]
            failure = None
            try:
                self._connection.sendall(message)
            except OSError:
                failure = PeerGone(self._to)
            with self._changed:
                self._failure = failure
                if failure:
                    self._waiting.clear()
                    self._changed.notify_all()
                    return
                self._waiting.popleft()
                self._changed.notify_all()


def _message(array: np.ndarray) -> list[memoryview]:
    """Encode length and content for the wire."""
    return [memoryview(_LENGTH.pack(array.nbytes)), bytes_of(array)]


def _send_some(rest: list[memoryview], connection: socket.socket, to: int) -> None:
    """Send as much of `rest` as goes without waiting, and drop it."""
    try:
        _drop(rest, connection.sendmsg(rest, [], socket.MSG_DONTWAIT))
    except BlockingIOError:
        return
    except OSError as error:
        raise PeerGone(to) from error


def _drop(views: list[memoryview], count: int) -> None:
    """Drop `count` bytes from the front, and empty buffers."""
    while views and count >= views[0].nbytes:
        count -= views.pop(0).nbytes
    if views:
        views[0] = views[0][count:]


def connect_peers(rank: int, gather: Callable[[Any], list[Any]]) -> SocketPeers:
    """Connect this rank with all others; all ranks call it at once.

    gather: every rank's picklable value, in rank order.
    """
    secret = secrets.token_bytes(16)
    with socket.create_server((_own_address(), 0), backlog=1024) as server:
        addresses = gather((*server.getsockname(), secret))
        # By now all listen: lower ranks are called, and the calls of higher ones are waiting to be answered.
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
        # A host that vanishes says nothing. After 10 s of silence it is asked, and after three questions given up:
        # before MindSpore's scheduler gives up (30 s) and ends ranks, which others would take for the first to go.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return SocketPeers(sockets)


def _own_address() -> str:
    """Find this host's address on the network of msrun's scheduler.

    The other ranks are on that network too.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it finds the route and sends nothing
        probe.connect((os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])))
        return probe.getsockname()[0]


def _call(rank: int, host: str, port: int, secret: bytes) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S)
    connection.sendall(b"".join(_message(np.frombuffer(_HELLO.pack(rank, secret), np.uint8))))
    return connection


def _answer(server: socket.socket, secret: bytes) -> tuple[int | None, socket.socket]:
    """Accept the next rank; returns it and its connection.

    Returns None for a caller that is no rank.
    """
    connection, (host, _) = server.accept()
    connection.settimeout(_HELLO_TIMEOUT_S)
    hello = np.empty(_HELLO.size, np.uint8)
    try:
        for _ in _receive([hello], connection, host):
            pass
    except (ConnectionError, RuntimeError):
        connection.close()
        return None, connection
    rank, given = _HELLO.unpack(hello)
    if not hmac.compare_digest(given, secret):
        connection.close()
        return None, connection
    return rank, connection
