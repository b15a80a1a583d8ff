"""Communication between ranks on NumPy arrays, the same on CPU and Ascend.

All ranks of a group call the same operations in the same order, with equal shapes and dtypes. A group is a sequence of
ascending global ranks that contains the caller; None is all ranks. A group of one needs no MindSpore. Not run on
Ascend.
"""

import functools
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from mindrlhf.backend.comm.point_to_point import LibraryPeers, Peers
from mindrlhf.backend.comm.tcp import SocketPeers, connect_peers

# Larger transfers are split: throughput on CPU falls above a few MB (it grows whole copies of each message).
BUCKET_BYTES = 4 << 20


class Collectives:
    """Collective operations of one rank of a `launch.World`."""

    def __init__(self, world):
        self.world = world

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
        from mindspore import Tensor
        from mindspore.mint import distributed

        if array.dtype.hasobject:
            raise TypeError("an array of Python objects has no bytes to send: use all_gather_object")
        data = np.ascontiguousarray(array).reshape(-1).view(np.int8)
        gathered = np.empty((len(ranks), data.size), np.int8)
        for start in range(0, data.size, BUCKET_BYTES):
            part = slice(start, start + BUCKET_BYTES)
            tensors = [Tensor(np.zeros_like(data[part])) for _ in ranks]
            distributed.all_gather(tensors, Tensor(data[part]), group=_group_name(ranks, self.world.size))
            for row, tensor in zip(gathered, tensors, strict=True):
                row[part] = tensor.asnumpy()
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
        values = self.all_gather_object(value if self.world.rank == root else None, group)
        return values[self._ranks(group).index(root)]

    def graph_group(self, group: Sequence[int] | None = None) -> str:
        return _group_name(self._ranks(group), self.world.size)

    def peers(self) -> Peers:
        """Open connections between pairs of ranks; all ranks make the first call together."""
        return _peers(self.world)

    def _ranks(self, group: Sequence[int] | None) -> tuple[int, ...]:
        ranks = tuple(range(self.world.size)) if group is None else tuple(group)
        if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(range(self.world.size)):
            raise ValueError(f"a group is ascending ranks below {self.world.size}, not {ranks}")
        if self.world.rank not in ranks:
            raise ValueError(f"rank {self.world.rank} is not in the group {ranks} that it was to talk to")
        return ranks


@functools.cache
def _peers(world) -> Peers:
    if world.size == 1:
        return SocketPeers({})
    if world.device_target == "Ascend":
        return LibraryPeers(world.rank, world.size)
    return connect_peers(world.rank, Collectives(world).all_gather_object)


@functools.cache
def _group_name(ranks: tuple[int, ...], world_size: int) -> str:
    """Create MindSpore's group of these ranks once, and return its name."""
    from mindspore import communication

    if len(ranks) == world_size:
        return communication.GlobalComm.WORLD_COMM_GROUP
    name = "ranks_" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    communication.create_group(name, list(ranks))
    return name
