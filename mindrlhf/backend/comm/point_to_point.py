"""Messages between two ranks, on NumPy arrays, for pipelines and online reshard.

`Collectives.peers()` returns `SocketPeers` on CPU, ten times as fast as MindSpore's own messages, and `LibraryPeers` on
Ascend. Messages arrive in order; the receiver knows their shape and dtype beforehand; one thread makes all calls.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol

import numpy as np

Messages = Mapping[int, Iterable[np.ndarray]]  # other rank -> arrays, in order


class PeerGone(ConnectionError):
    """Another rank's process ended before the job did."""

    def __init__(self, rank: int | str):
        super().__init__(
            f"rank {rank} is gone: its process failed (its own log says why) or was killed (perhaps for lack of "
            "memory), or its host cannot be reached"
        )


class PeerSilent(PeerGone):
    """Another rank stood still for longer than the limit."""

    def __init__(self, rank: int | str, phase: str, seconds: float, own_phase: str):
        name = rank if isinstance(rank, str) else f"rank {rank}"
        ConnectionError.__init__(
            self,
            f"{name} stood still for {seconds:.0f} s in the phase {phase} (this rank: {own_phase}): it may be stopped, "
            "swapping, or its host frozen; trainer.rank_timeout_s sets how long a rank is waited for",
        )


class Peers(Protocol):
    """Connections of one rank to all others."""

    def send(self, array: np.ndarray, to: int) -> None:
        """Send to rank `to` and return at once, even before that rank receives.

        array: any plain dtype and memory layout; it is copied, so the caller may change it afterwards.
        """

    def receive(self, into: np.ndarray, source: int) -> np.ndarray:
        """Fill a C-contiguous array with the next message from rank `source`."""

    def exchange(self, outgoing: Messages, incoming: Messages) -> None:
        """Send to and receive from several ranks at once, without copies.

        All ranks that exchange with each other call it. Arrays are C-contiguous. When the next array is requested, an
        incoming one has been filled; until then an outgoing one must not change. Both may be generators, so that an
        array exists only during its transfer; other threads may run the outgoing generators.
        """


def bytes_of(array: np.ndarray) -> memoryview:
    """View the bytes of a C-contiguous array, writable if the array is."""
    if not array.flags.c_contiguous:
        raise ValueError("a message has to lie in one piece of memory")
    return memoryview(array.reshape(-1).view(np.uint8))


class LibraryPeers:
    """Peers on `mindspore.mint.distributed`, for hccl; all ranks build it together.

    hccl has not been run here; the tests run this class on CPU. All ranks exchange over pairs of ranks in the same
    order, and the lower rank sends first, because on hccl a send may wait until it is received. Empty messages are not
    sent: MindSpore's receive hangs on them.
    """

    def __init__(self, rank: int, size: int):
        from mindspore import communication

        self._rank = rank
        self._sending: dict[int, tuple] = {}  # other rank -> (handle, tensor that has to live until it is sent)
        if communication.GlobalComm.WORLD_COMM_GROUP != "hccl_world_group":
            communication.create_group("hccl_world_group", list(range(size)))  # the only name that `send` looks up

    def send(self, array: np.ndarray, to: int) -> None:
        """Send like `Peers.send`, once the previous message to that rank is sent."""
        from mindspore.mint import distributed

        if array.size == 0:
            return
        if to in self._sending:
            self._sending.pop(to)[0].wait()
        tensor = _tensor(np.ascontiguousarray(array))
        self._sending[to] = (distributed.isend(tensor, to), tensor)

    def receive(self, into: np.ndarray, source: int) -> np.ndarray:
        from mindspore.mint import distributed

        if into.size:
            tensor = _tensor(np.empty_like(into))
            distributed.recv(tensor, source)
            bytes_of(into)[:] = tensor.asnumpy().view(np.uint8)
        return into

    def exchange(self, outgoing: Messages, incoming: Messages) -> None:
        for other in sorted(outgoing.keys() | incoming.keys()):
            if other < self._rank:
                self._receive_all(incoming.get(other, ()), other)
            self._send_all(outgoing.get(other, ()), other)
            if other > self._rank:
                self._receive_all(incoming.get(other, ()), other)

    def _send_all(self, arrays: Iterable[np.ndarray], to: int) -> None:
        from mindspore.mint import distributed

        for array in arrays:
            if array.size:
                distributed.send(_tensor(array), to)

    def _receive_all(self, arrays: Iterable[np.ndarray], source: int) -> None:
        for array in arrays:
            self.receive(array, source)


def _tensor(array: np.ndarray):
    """Convert the bytes of a C-contiguous array to an int8 tensor."""
    from mindspore import Tensor

    return Tensor(np.frombuffer(bytes_of(array), np.int8))
