"""Owner's side of a worker: calls and replies, as lines of JSON."""

import json
import math
import os
import select
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 28  # of one reply; more is not read into the memory of the training


class Loss(NamedTuple):
    """Reason why a call has no reply.

    seconds: time that the call took. timed_out: the reason is the time limit.
    """

    error: str
    seconds: float = 0.0
    timed_out: bool = False


class Peer(ABC):
    """Other end of two pipes, which answers calls in order.

    The pipes never block, and each call has a time limit.
    calls: its calls without a reply, in order; the first is under way. exited: it sends nothing more. repeated: it has
    answered a call twice, for which the call under way is not to blame.
    """

    def __init__(self, reading: int, writing: int, timeout_s: float, first_timeout_s: float):
        """Take descriptors. first_timeout_s: seconds until its first message."""
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        self._reading = reading
        self._writing = writing
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + first_timeout_s
        self._outbox = memoryview(b"")
        self._inbox = bytearray()
        self._answered = 0  # calls; a call's number is the number of calls before it
        self._stray = False  # it sent a message that is no reply to its call
        self.calls: deque[Any] = deque()
        self.exited = self.repeated = False

    @property
    def idle(self) -> bool:
        return not self.calls

    def assign(self, calls: Sequence[Any], requests: Iterable[Sequence[Any]]) -> None:
        """Hand out a request for each call; the peer must be idle."""
        self.calls.extend(calls)
        self._deadline = time.monotonic() + self._timeout_s
        self._post([(number, *request) for number, request in enumerate(requests, self._answered)])

    def collect(self) -> list[tuple[Any, Any]]:
        """Move data through the pipes; returns (call, reply) for calls answered since."""
        self._write()
        answered = []
        with suppress(BlockingIOError):
            received = self._read()
            self.exited = self.exited or not received
            try:
                for line in self._lines(received):
                    answered += self._receive(orjson.loads(line))
                    self._deadline = time.monotonic() + self._timeout_s
            except ValueError:
                self._stray = self.exited = True
        return answered

    def loss(self) -> Loss | None:
        """Explain why a hanging or dead peer gives no reply; None otherwise."""
        if self.exited:
            return Loss("its process sent what is no answer" if self._stray else self._end_reason())
        if self.idle or time.monotonic() < self._deadline:
            return None
        return Loss(f"it took longer than {self._timeout_s:g} s", self._timeout_s, timed_out=True)

    @abstractmethod
    def _reply(self, values: list[Any]) -> Any:
        """Convert the values of a reply, without its number; ValueError for invalid ones."""

    def _end_reason(self) -> str:
        return "its process ended"

    def _receive(self, message: Any) -> list[tuple[Any, Any]]:
        """Take the reply to the call under way; ValueError for other messages."""
        match message:
            case [int(number), *values]:
                reply = self._reply(values)
                self.repeated = 0 <= number < self._answered
                if self.calls and number == self._answered:
                    self._answered += 1
                    return [(self.calls.popleft(), reply)]
        raise ValueError

    def _lines(self, received: bytes) -> Iterator[bytes]:
        """Split complete lines off `received`, in linear time; an incomplete line waits."""
        self._inbox.extend(received)
        if b"\n" not in received:
            if len(self._inbox) > MAX_LINE_BYTES:
                raise ValueError
            return
        *lines, rest = bytes(self._inbox).split(b"\n")
        self._inbox = bytearray(rest)
        yield from lines

    def _post(self, message: Any) -> None:
        self._outbox = memoryview(json.dumps(message, separators=(",", ":"), default=dict).encode() + b"\n")
        self._write()

    def _read(self) -> bytes:
        try:
            return os.read(self._reading, READ_BYTES)
        except ConnectionResetError:
            return b""

    def _write(self) -> None:
        try:
            while self._outbox and not self.exited:
                self._outbox = self._outbox[os.write(self._writing, self._outbox) :]
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self.exited = True


def wait(peers: Iterable[Peer], most_s: float = math.inf) -> list[Peer]:
    """Sleep until a peer answers, accepts input, or is overdue; some must be busy.

    It sleeps for `most_s` seconds at most, and returns the peers that have woken it.
    """
    by_descriptor: dict[int, Peer] = {}
    poll = select.poll()
    for peer in peers:
        by_descriptor[peer._reading] = peer
        if peer._outbox:
            by_descriptor[peer._writing] = peer
            poll.register(peer._writing, select.POLLOUT)
        both = peer._outbox and peer._reading == peer._writing
        poll.register(peer._reading, select.POLLIN | select.POLLOUT if both else select.POLLIN)
    busy = [peer for peer in by_descriptor.values() if not peer.idle]
    deadline = min(peer._deadline for peer in busy)
    ready = poll.poll(1000.0 * max(0.0, min(most_s, deadline - time.monotonic())))
    now = time.monotonic()
    overdue = [peer for peer in busy if now >= peer._deadline] if now >= deadline else []
    return list(dict.fromkeys([*(by_descriptor[descriptor] for descriptor, _ in ready), *overdue]))
