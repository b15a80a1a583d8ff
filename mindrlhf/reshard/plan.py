"""Plans that turn one layout into another: senders, receivers, parts. Pure Python.

A plan is executed online between graphs (`online.py`) and over files (`checkpoint/transform.py`). Each rank keeps the
parts that it holds already and gets everything else exactly once, so that the bytes moved are the least possible.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod

from mindrlhf.files.text import aligned
from mindrlhf.parallel.layout import Box, Layout, Slices, box_of, box_shape, inside, overlap, sliced_shape


@dataclass(frozen=True)
class Transfer:
    """Transfer of one box of a parameter.

    source, destination: ranks; equal for a copy within the rank.
    source_slices, destination_slices: the box in the coordinates of each rank's part, not of the full parameter.
    """

    parameter: str
    source: int
    source_slices: Slices
    destination: int
    destination_slices: Slices
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.parameter}: rank {self.source} {_text(self.source_slices)} -> "
            f"rank {self.destination} {_text(self.destination_slices)}, {self.nbytes:,} bytes"
        )

    def split(self, limit: int) -> Iterator["Transfer"]:
        """Cut into pieces of at most `limit` bytes, or one element.

        They are in memory order, and of about one size.
        """
        shape = sliced_shape(self.source_slices)
        dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
        if self.nbytes <= limit or dim is None:
            yield self
            return
        row = self.nbytes // shape[dim]
        count = -(-shape[dim] // max(1, limit // row))
        step = -(-shape[dim] // count)
        for start in range(0, shape[dim], step):
            stop = min(start + step, shape[dim])
            piece = replace(
                self,
                source_slices=_rows(self.source_slices, dim, start, stop),
                destination_slices=_rows(self.destination_slices, dim, start, stop),
                nbytes=row * (stop - start),
            )
            yield from piece.split(limit)


@dataclass(frozen=True)
class Plan:
    """Transfers that turn `source` into `destination`.

    transfers: between different ranks, ordered by parameter (table order), source, place in the parameter, destination:
        every rank makes the same list, and the transfers of a box to several ranks are neighbours.
    copies: within a rank. itemsize: bytes of one element.
    """

    source: Layout
    destination: Layout
    transfers: tuple[Transfer, ...]
    copies: tuple[Transfer, ...]
    itemsize: int

    @cached_property
    def sent(self) -> dict[int, int]:
        return self._moved(self.source, lambda transfer: transfer.source)

    @cached_property
    def received(self) -> dict[int, int]:
        return self._moved(self.destination, lambda transfer: transfer.destination)

    @cached_property
    def least(self) -> dict[int, int]:
        """Least bytes that each destination rank must receive under any plan."""
        return self._missing(lambda name, part: box_of(part))

    @cached_property
    def all_gather(self) -> dict[int, int]:
        """Bytes that each destination rank would receive if parameters were gathered whole."""
        return self._missing(lambda name, part: tuple((0, size) for size in self.source.placements[name].shape))

    def describe(self, every_transfer: bool = False) -> str:
        """Format bytes per rank, and every transfer if asked for."""
        figures = {
            "holds before": _held(self.source, self.itemsize),
            "holds after": _held(self.destination, self.itemsize),
            "sends": self.sent,
            "receives": self.received,
            "least possible": self.least,
            "all-gather": self.all_gather,
        }
        columns = figures.values()
        rows = [("bytes", *figures)]
        for rank in sorted({*self.source.ranks, *self.destination.ranks}):
            rows.append((f"rank {rank}", *(f"{column[rank]:,}" if rank in column else "-" for column in columns)))
        rows.append(("all", *(f"{sum(column.values()):,}" for column in columns)))
        title = (
            f"{len(self.destination.placements)} parameters from {self.source.size} to {self.destination.size} ranks: "
            f"{len(self.transfers)} transfers, {len(self.copies)} local copies"
        )
        return "\n".join([title, aligned(rows), *(map(str, self.transfers) if every_transfer else ())])

    def _moved(self, layout: Layout, rank: Callable[[Transfer], int]) -> dict[int, int]:
        """Sum the bytes of transfers by `rank` of each, over a layout's ranks."""
        total = dict.fromkeys(layout.ranks, 0)
        for transfer in self.transfers:
            total[rank(transfer)] += transfer.nbytes
        return total

    def _missing(self, wanted: Callable[[str, Slices], Box]) -> dict[int, int]:
        """Sum the bytes of `wanted(name, part)` that each destination rank lacks."""
        total = dict.fromkeys(self.destination.ranks, 0)
        for rank in total:
            for name, part in self.destination.shards(rank):
                box = wanted(name, part)
                own = self.source.slices(rank, name) if rank in self.source.ranks else None
                kept = None if own is None else overlap(box, box_of(own))
                total[rank] += (_size(box) - (0 if kept is None else _size(kept))) * self.itemsize
        return total


def plan(source: Layout, destination: Layout, itemsize: int = 4) -> Plan:
    """Plan the transfers that turn `source` into `destination`, layouts of the same parameters.

    A destination rank copies the parts that it holds already. Each other piece comes from the holder that has sent the
    least so far. A tie goes to the nearest holder, with the smallest exclusive or of the two ranks: this prefers the
    same host and pairs equal positions in two groups of ranks.
    itemsize: bytes of one element.
    """
    if source.shapes != destination.shapes:
        name, shape = min(set(source.shapes.items()) ^ set(destination.shapes.items()))
        raise ValueError(f"both layouts must have the same parameters, and {name} {list(shape)} is in one only")
    sent = dict.fromkeys(source.ranks, 0)
    transfers: list[Transfer] = []
    copies: list[Transfer] = []
    known: dict[tuple, list[_Piece]] = {}
    for name, goal in destination.placements.items():
        origin = source.placements[name]
        geometry = (origin.shape, *(tuple(placement.shardings.items()) for placement in (origin, goal)))
        if geometry not in known:
            known[geometry] = _pieces(source, destination, name)
        moved = []
        for piece in known[geometry]:
            nbytes = _size(piece.box) * itemsize
            giver = piece.rank
            if giver not in piece.holders:
                giver = min(piece.holders, key=lambda rank: (sent[rank], rank ^ piece.rank))
                sent[giver] += nbytes
            taken, put = inside(piece.box, piece.holders[giver]), inside(piece.box, piece.part)
            transfer = Transfer(name, giver, taken, piece.rank, put, nbytes)
            if giver == piece.rank:
                copies.append(transfer)
            else:
                moved.append((giver, piece.box, piece.rank, transfer))
        transfers += [entry[-1] for entry in sorted(moved, key=lambda entry: entry[:-1])]
    return Plan(source, destination, tuple(transfers), tuple(copies), itemsize)


@dataclass(frozen=True)
class _Piece:
    """Box that `rank` needs for its `part`; holders: source rank -> its part."""

    box: Box
    rank: int
    part: Box
    holders: Mapping[int, Box]


def _pieces(source: Layout, destination: Layout, name: str) -> list[_Piece]:
    """Cut every destination rank's part of a parameter at the source parts' ends."""
    holders = source.holders(name)
    cuts = [sorted({end for part in holders for end in part[dim]}) for dim in range(len(source.placements[name].shape))]
    pieces = []
    for rank in destination.ranks:
        slices = destination.slices(rank, name)
        if slices is None:
            continue
        part = box_of(slices)
        inner = [
            pairwise([start, *(cut for cut in ends if start < cut < stop), stop])
            for (start, stop), ends in zip(part, cuts, strict=True)
        ]
        for box in product(*inner):
            givers = {giver: held for held, ranks in holders.items() if overlap(held, box) == box for giver in ranks}
            pieces.append(_Piece(box, rank, part, givers))
    return pieces


def _held(layout: Layout, itemsize: int) -> dict[int, int]:
    return {rank: sum(prod(sliced_shape(part)) for _, part in layout.shards(rank)) * itemsize for rank in layout.ranks}


def _size(box: Box) -> int:
    return prod(box_shape(box))


def _rows(slices: Slices, dim: int, start: int, stop: int) -> Slices:
    """Select rows start..stop, counted along `dim` from the slices' start."""
    first = slices[dim].start
    return (*slices[:dim], slice(first + start, first + stop), *slices[dim + 1 :])


def _text(slices: Slices) -> str:
    return "[" + ", ".join(f"{part.start}:{part.stop}" for part in slices) + "]"
