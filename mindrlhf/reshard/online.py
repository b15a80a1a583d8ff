"""Reshard between running graphs: weights change layout in memory, without files.

Every rank writes its parts of the destination layout in place, so that compiled graphs see the new weights. A
contiguous box is sent from its place and received in its place; any other is packed and unpacked. On Ascend, where this
has not been run, numbers are copied to the host and back.
"""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import BUCKET_BYTES, Collectives
from mindrlhf.backend.comm.point_to_point import Peers, bytes_of
from mindrlhf.files.text import some
from mindrlhf.parallel.layout import Layout, Shape, Slices, full_layout, sliced_shape
from mindrlhf.reshard.plan import Plan, Transfer, plan

if TYPE_CHECKING:
    from mindspore import Parameter

Shards = Mapping[str, "Parameter"]  # name -> the part of a weight that a rank holds
Arrays = Mapping[str, np.ndarray]  # the same as arrays on the host


class ReshardError(RuntimeError):
    """Error for weights that differ from their source after a reshard."""


@dataclass(frozen=True)
class ReshardStatistics:
    """Bytes and seconds of a reshard on one rank.

    bytes_copied: within the rank. bytes_shared: of parameters that both layouts use. seconds: without verification.
    """

    bytes_sent: int
    bytes_received: int
    bytes_copied: int
    bytes_shared: int
    seconds: float


class OnlineReshard:
    """One rank's part in executing a plan, any number of times.

    Every rank makes one at the same time, with the same plan and bucket_bytes (the largest message).
    source, destination: every parameter that this rank holds in each layout, all of one dtype. A parameter in both does
    not change.
    """

    def __init__(
        self,
        plan: Plan,
        collectives: Collectives,
        source: Shards,
        destination: Shards,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        rank = collectives.world.rank
        before = _check(source, plan.source, rank, plan.itemsize)
        after = _check(destination, plan.destination, rank, plan.itemsize)
        dtypes = {str(source[name].dtype) for name in before} | {str(destination[name].dtype) for name in after}
        if len(dtypes) > 1:
            raise ValueError(f"source and destination are to be of one dtype, not of {' and '.join(sorted(dtypes))}")
        shared = {name for name in before & after if source[name] is destination[name]}
        self.source = source
        self.destination = destination
        self._filled = sorted(after - shared)
        self._peers = collectives.peers()
        moved = (copy for copy in plan.copies if copy.destination != rank or copy.parameter not in shared)
        self._share = _Share.of(rank, chain(moved, plan.transfers), bucket_bytes)
        self._bytes = {
            "bytes_sent": plan.sent.get(rank, 0),
            "bytes_received": plan.received.get(rank, 0),
            "bytes_copied": sum(copy.nbytes for copy in self._share.copies),
            "bytes_shared": sum(destination[name].nbytes for name in shared),
        }

    def run(self, verify: bool = False) -> ReshardStatistics:
        """Fill the destination; every rank calls it. verify: call `verify` afterwards."""
        start = time.perf_counter()
        with backend.rewriting({name: self.destination[name] for name in self._filled}) as arrays:
            self._share.move(self._peers, self._given(), arrays)
        seconds = time.perf_counter() - start
        if verify:
            self.verify()
        return ReshardStatistics(**self._bytes, seconds=seconds)

    def verify(self) -> None:
        """Compare checksums (CRC-32) of sources and destinations; every rank calls it."""
        share = self._share
        source = self._given()
        sums = {rank: np.empty(len(pieces), np.uint32) for rank, pieces in share.incoming.items()}
        self._peers.exchange(
            {rank: [_source_sums(source, pieces)] for rank, pieces in share.outgoing.items()},
            {rank: [array] for rank, array in sums.items()},
        )
        pieces = [*share.copies, *chain.from_iterable(share.incoming.values())]
        expected = np.concatenate([_source_sums(source, share.copies), *sums.values()])
        destination = backend.read_all({p.parameter: self.destination[p.parameter] for p in pieces})
        found = [_checksum(destination[p.parameter], p.destination_slices) for p in pieces]
        wrong = [piece for piece, differs in zip(pieces, expected != found, strict=True) if differs]
        if wrong:
            raise ReshardError(f"checksums differ after the reshard: {some(list(map(str, wrong)))}")

    def _given(self) -> Arrays:
        """Collect the source numbers that this rank copies or sends."""
        pieces = chain(self._share.copies, *self._share.outgoing.values())
        return backend.read_all({piece.parameter: self.source[piece.parameter] for piece in pieces})


def gather_full(
    layout: Layout, collectives: Collectives, shards: Shards, dtype: str = "float32"
) -> Iterator[tuple[str, np.ndarray | None]]:
    """Gather full parameters on the layout's first rank, in table order.

    Yields (name, full parameter) there and (name, None) on the others; every rank iterates to the end.
    shards: all parts that this rank holds. The first rank's arrays are read-only: in host memory, whole parameters are
    not copied.
    """
    rank = collectives.world.rank
    itemsize = np.dtype(dtype).itemsize
    _check(shards, layout, rank, itemsize)
    peers = collectives.peers()
    first = layout.ranks[0]
    gathering = plan(layout, full_layout(layout.shapes, first), itemsize)
    transfers: dict[str, list[Transfer]] = {name: [] for name in layout.placements}
    for transfer in (*gathering.copies, *gathering.transfers):
        transfers[transfer.parameter].append(transfer)

    def gathered(name: str, shape: Shape) -> np.ndarray | None:
        if rank == first and name in shards and shards[name].shape == shape:
            return backend.read(shards[name])
        full = np.empty(shape, dtype) if rank == first else None
        own = {name: backend.read(shards[name])} if name in shards else {}
        _Share.of(rank, transfers[name], BUCKET_BYTES).move(peers, own, {name: full})
        return full

    for name, shape in layout.shapes.items():
        yield name, gathered(name, shape)  # holds no reference while the next one is made


@dataclass(frozen=True)
class _Share:
    """Copies of one rank, and its outgoing and incoming transfers by other rank."""

    copies: Sequence[Transfer]
    outgoing: Mapping[int, Sequence[Transfer]]
    incoming: Mapping[int, Sequence[Transfer]]

    @classmethod
    def of(cls, rank: int, transfers: Iterable[Transfer], limit: int) -> "_Share":
        share = cls([], {}, {})
        for transfer in transfers:
            pieces = transfer.split(limit)
            if transfer.source == transfer.destination == rank:
                share.copies.extend(pieces)
            elif transfer.source == rank:
                share.outgoing.setdefault(transfer.destination, []).extend(pieces)
            elif transfer.destination == rank:
                share.incoming.setdefault(transfer.source, []).extend(pieces)
        return share

    def move(self, peers: Peers, source: Arrays, destination: Arrays) -> None:
        """Execute all copies and transfers."""
        for piece in self.copies:
            target = _box(destination[piece.parameter], piece.destination_slices)
            target[...] = _box(source[piece.parameter], piece.source_slices)
        peers.exchange(
            {rank: _packed(pieces, source) for rank, pieces in self.outgoing.items()},
            {rank: _unpacked(pieces, destination) for rank, pieces in self.incoming.items()},
        )


def _packed(pieces: Sequence[Transfer], source: Arrays) -> Iterator[np.ndarray]:
    """Turn pieces into messages; only a non-contiguous piece is copied."""
    for piece in pieces:
        yield np.ascontiguousarray(_box(source[piece.parameter], piece.source_slices))


def _unpacked(pieces: Sequence[Transfer], destination: Arrays) -> Iterator[np.ndarray]:
    """Yield buffers for incoming messages; unpacks each when the next is requested."""
    for piece in pieces:
        target = _box(destination[piece.parameter], piece.destination_slices)
        message = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
        yield message
        if message is not target:
            target[...] = message


def _box(array: np.ndarray, slices: Slices) -> np.ndarray:
    """View a part of an array, which may be a scalar."""
    return array[(*slices, ...)]


def _source_sums(source: Arrays, pieces: Sequence[Transfer]) -> np.ndarray:
    return np.array([_checksum(source[p.parameter], p.source_slices) for p in pieces], np.uint32)


def _checksum(array: np.ndarray, slices: Slices) -> int:
    return zlib.crc32(bytes_of(np.ascontiguousarray(_box(array, slices))))


def _check(shards: Shards, layout: Layout, rank: int, itemsize: int) -> set[str]:
    """Check that a rank's parameters are complete and have the right shapes."""
    held = dict(layout.shards(rank))
    for name, part in held.items():
        if name not in shards:
            raise ValueError(f"rank {rank} holds a part of {name}, which is not given")
        parameter = shards[name]
        shape = sliced_shape(part)
        if (parameter.shape, parameter.itemsize) != (shape, itemsize):
            raise ValueError(
                f"{name}: rank {rank} holds {list(shape)} of {itemsize} bytes each, "
                f"not {list(parameter.shape)} of {parameter.dtype}"
            )
    return set(held)
