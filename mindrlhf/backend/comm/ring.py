"""Large messages between two ranks of one host, through memory that both have mapped.

The sender copies a message into a ring of slots while the receiver copies it out; the slots stay in the processor's
cache, so that it costs about what one copy within a process does. A byte in the channel says that a slot is full, and a
byte in a second connection (credits) that one is empty again: whoever waits for a rank that is gone or stands still
learns of it as in any other message. Linux only; where the memory cannot be shared, sockets carry everything.
"""

import mmap
import os
import socket
import struct
from contextlib import suppress

import numpy as np

from mindrlhf.backend.comm.connection import fill
from mindrlhf.backend.native.copying import stream_copy

# Of a message: a shorter one is faster through buffers of sockets. In a row, nobody waits for the first byte.
LEAST_BYTES_ALONE = 3 << 19
LEAST_BYTES_IN_A_ROW = 1 << 18
SLOT_BYTES = 1 << 20
SLOT_COUNT = 4

_PLACE = struct.Struct("!ii")  # a process and its file
_NO_FILE = -1


class OutgoingRing:
    """Way to one other rank.

    The first message settles with that rank whether they share memory.
    """

    def __init__(self, channel: socket.socket, credits: socket.socket, to: int):
        self._channel, self._credits, self._to = channel, credits, to
        self._slots: np.ndarray | None = None
        self._settled = False
        self._sent = self._free = 0

    def send(self, content: memoryview) -> None:
        """Send bytes; the other rank calls `IncomingRing.receive` with as many."""
        if not self._settled:
            self._settle()
        if self._slots is None:
            self._channel.sendall(content)
            return
        array = np.frombuffer(content, np.uint8)
        for start in range(0, array.size, SLOT_BYTES):
            if not self._free:
                _byte(self._credits, self._to)
                self._free += 1
            part = array[start : start + SLOT_BYTES]
            np.copyto(self._slots[self._sent % SLOT_COUNT, : part.size], part)
            self._sent += 1
            self._free -= 1
            self._channel.sendall(b"\1")

    def _settle(self) -> None:
        """Offer memory to the other rank, which says whether it can map it."""
        file, slots = _new_memory()
        self._channel.sendall(_PLACE.pack(os.getpid(), file))
        if _byte(self._credits, self._to):
            self._slots, self._free = slots, SLOT_COUNT
        if file != _NO_FILE:
            os.close(file)
        self._settled = True


class IncomingRing:
    """Way from one other rank."""

    def __init__(self, channel: socket.socket, credits: socket.socket, source: int):
        self._channel, self._credits, self._source = channel, credits, source
        self._slots: np.ndarray | None = None
        self._settled = False
        self._received = 0

    def receive(self, content: memoryview, in_a_row: bool) -> None:
        """Fill `content` with what the other rank sends.

        in_a_row: more is to follow before it is read, so that caches need not have it.
        """
        if not self._settled:
            self._settle()
        if self._slots is None:
            fill(content, self._channel, self._source)
            return
        array = np.frombuffer(content, np.uint8)
        copy = stream_copy if in_a_row else np.copyto
        for start in range(0, array.size, SLOT_BYTES):
            _byte(self._channel, self._source)
            part = array[start : start + SLOT_BYTES]
            copy(part, self._slots[self._received % SLOT_COUNT, : part.size])
            self._received += 1
            self._answer(b"\1")

    def _settle(self) -> None:
        place = bytearray(_PLACE.size)
        fill(memoryview(place), self._channel, self._source)
        self._slots = _memory_of(*_PLACE.unpack(place))
        self._answer(b"\0" if self._slots is None else b"\1")
        self._settled = True

    def _answer(self, byte: bytes) -> None:
        with suppress(OSError):  # a rank that is gone may have sent all that is due; if not, the next byte is missing
            self._credits.sendall(byte)


def _byte(connection: socket.socket, rank: int) -> int:
    byte = bytearray(1)
    fill(memoryview(byte), connection, rank)
    return byte[0]


def _new_memory() -> tuple[int, np.ndarray | None]:
    """Make a file in memory and map it.

    Returns _NO_FILE and None if the system refuses.
    """
    file = _NO_FILE
    try:
        file = os.memfd_create("mindrlhf-ring")
        os.posix_fallocate(file, 0, SLOT_COUNT * SLOT_BYTES)
        return file, _mapped(file)
    except (OSError, AttributeError):  # AttributeError: no Linux
        if file != _NO_FILE:
            os.close(file)
        return _NO_FILE, None


def _memory_of(process: int, file: int) -> np.ndarray | None:
    """Map another process's file; None if that is not possible."""
    if file == _NO_FILE:
        return None
    try:
        own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _mapped(own)
    except (OSError, ValueError):  # ValueError: it is shorter
        return None
    finally:
        os.close(own)


def _mapped(file: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(file, SLOT_COUNT * SLOT_BYTES), np.uint8).reshape(SLOT_COUNT, SLOT_BYTES)
