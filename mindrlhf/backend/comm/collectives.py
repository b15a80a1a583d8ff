"""Communication between ranks on NumPy arrays, the same on CPU and Ascend.

All ranks of a group call the same operations in the same order, with equal shapes and dtypes. A group is a sequence of
ascending global ranks that contains the caller; None is all ranks of the `Collectives`. By `Device.collectives`
everything goes over the job's own sockets (`tcp.Channels`), or through MindSpore's library; that has not been run on
Ascend.
"""

import functools
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindrlhf.backend.comm.point_to_point import LibraryPeers, Peers
from mindrlhf.backend.device import SOCKETS
from mindrlhf.backend.devices import find_device

BUCKET_BYTES = 4 << 20  # of one transfer by MindSpore, which keeps whole copies of each message
SMALL_BYTES = 1 << 16  # fits in any socket's buffer


class Collectives:
    """Collective operations of one rank of a `launch.World`.

    ranks: the ascending ranks that they are among without a group, all by default; this rank is one of them.
    """

    def __init__(self, world, ranks: Sequence[int] | None = None):
        self.world = world
        self.ranks = tuple(range(world.size) if ranks is None else ranks)

    def over(self, ranks: Sequence[int]) -> "Collectives":
        """Return the same operations among `ranks`."""
        return type(self)(self.world, ranks)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def place(self) -> int:
        """Index of this rank among `ranks`."""
        return self.ranks.index(self.world.rank)

    @property
    def is_first(self) -> bool:
        """True on the first of the ranks, which writes for all."""
        return self.place == 0

    @property
    def by_library(self) -> bool:
        """True if MindSpore's library moves the arrays, and not the job's own sockets."""
        return find_device(self.world.device_target).collectives != SOCKETS

    def all_reduce_sum(self, array: np.ndarray, group: Sequence[int] | None = None) -> np.ndarray:
        """Sum small arrays over the group in rank order: equal bits on every rank."""
        return functools.reduce(np.add, self.all_gather(array, group))

    def all_reduce_max(self, array: np.ndarray, group: Sequence[int] | None = None) -> np.ndarray:
        """Compute the elementwise maximum over the group; NaN wins."""
        return self.all_gather(array, group).max(axis=0)

    def all_gather(self, array: np.ndarray, group: Sequence[int] | None = None) -> np.ndarray:
        """Stack every rank's array of a plain dtype, bit for bit: [size, *shape]."""
        ranks = self._ranks(group)
        if len(ranks) == 1:
            return array[np.newaxis]
        if array.dtype.hasobject:
            raise TypeError("an array of Python objects has no bytes to send: use all_gather_object")
        data = np.ascontiguousarray(array).reshape(-1).view(np.int8)
        if self.by_library:
            gathered = _gather_by_library(data, _group_name(ranks, self.world.size), len(ranks))
        else:
            gathered = gather_over(self.world.channels.gathers, data, ranks, self.world.rank)
        return gathered.reshape(-1).view(array.dtype).reshape(len(ranks), *array.shape)

    def barrier(self, group: Sequence[int] | None = None) -> None:
        """Wait until every rank of the group has called it."""
        self.all_gather(np.zeros(1, np.int8), group)

    def all_gather_object(self, value: Any, group: Sequence[int] | None = None) -> list[Any]:
        """Collect every rank's picklable value, in the group's order."""
        ranks = self._ranks(group)
        if len(ranks) == 1:
            return [value]
        message = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = self.all_gather(np.array(message.size), ranks)
        padded = np.zeros(lengths.max(), np.uint8)
        padded[: message.size] = message
        rows = self.all_gather(padded, ranks)
        return [pickle.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]

    def broadcast_object(self, value: Any, root: int, group: Sequence[int] | None = None) -> Any:
        """Return the picklable value of `root`, one of the group."""
        ranks = self._ranks(group)
        place = ranks.index(root)
        if len(ranks) == 1:
            return value
        if self.by_library:
            return self.all_gather_object(value if self.world.rank == root else None, ranks)[place]
        message = np.frombuffer(pickle.dumps(value), np.int8) if self.world.rank == root else None
        return pickle.loads(spread_over(self.world.channels.gathers, message, ranks, root).tobytes())

    def graph_group(self, group: Sequence[int] | None = None) -> str:
        return _group_name(self._ranks(group), self.world.size)

    def peers(self) -> Peers:
        """Return connections between pairs of ranks.

        With a library all ranks make the first call together.
        """
        if self.by_library and self.world.size > 1:
            return _library_peers(self.world.rank, self.world.size)
        return self.world.channels.messages

    def _ranks(self, group: Sequence[int] | None) -> tuple[int, ...]:
        ranks = self.ranks if group is None else tuple(group)
        if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(range(self.world.size)):
            raise ValueError(f"a group is ascending ranks below {self.world.size}, not {ranks}")
        if self.world.rank not in ranks:
            raise ValueError(f"rank {self.world.rank} is not in the group {ranks} that it was to talk to")
        return ranks


def gather_over(peers: Peers, data: np.ndarray, ranks: Sequence[int], rank: int) -> np.ndarray:
    """Stack the bytes of all ranks: int8[n] -> int8[len(ranks), n].

    Each rank of `ranks` calls it.
    """
    gathered = np.empty((len(ranks), data.size), np.int8)
    rows = dict(zip(ranks, gathered, strict=True))
    rows.pop(rank)[:] = data
    if data.size <= SMALL_BYTES:  # without the threads of an exchange
        for other in rows:
            peers.send(data, other)
        for other, row in rows.items():
            peers.receive(row, other)
    else:
        peers.exchange({other: [data] for other in rows}, {other: [row] for other, row in rows.items()})
    return gathered


def spread_over(peers: Peers, data: np.ndarray | None, ranks: Sequence[int], root: int) -> np.ndarray:
    """Bring the bytes int8[n] of `root` to all ranks, without others' knowing their number.

    Each rank of `ranks` calls it. data: None on the others, which answer with a byte: `root` learns of a rank that is
    gone or stands still.
    """
    thanks = np.zeros(1, np.int8)
    if data is None:
        data = np.empty(int(peers.receive(np.empty(1, np.int64), root)[0]), np.int8)
        peers.exchange({root: [thanks]}, {root: [data]})
        return data
    others = [other for other in ranks if other != root]
    for other in others:
        peers.send(np.array([data.size]), other)
    peers.exchange({other: [data] for other in others}, {other: [thanks] for other in others})
    return data


def _gather_by_library(data: np.ndarray, group: str, size: int) -> np.ndarray:
    from mindspore import Tensor
    from mindspore.mint import distributed

    gathered = np.empty((size, data.size), np.int8)
    for start in range(0, data.size, BUCKET_BYTES):
        part = slice(start, start + BUCKET_BYTES)
        tensors = [Tensor(np.zeros_like(data[part])) for _ in range(size)]
        distributed.all_gather(tensors, Tensor(data[part]), group=group)
        for row, tensor in zip(gathered, tensors, strict=True):
            row[part] = tensor.asnumpy()
    return gathered


@functools.cache
def _library_peers(rank: int, size: int) -> Peers:
    return LibraryPeers(rank, size)


@functools.cache
def _group_name(ranks: tuple[int, ...], world_size: int) -> str:
    """Create MindSpore's group of these ranks once, and return its name."""
    from mindspore import communication

    if len(ranks) == world_size:
        return communication.GlobalComm.WORLD_COMM_GROUP
    name = "ranks_" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    communication.create_group(name, list(ranks))
    return name
