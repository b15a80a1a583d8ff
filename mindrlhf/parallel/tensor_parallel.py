"""One rank's place among its layers' tensor-parallel ranks, for use in graphs.

A layer's inputs enter its parallel region through `enter` and leave it through `leave`. Without sequence parallelism
all ranks hold all rows outside of the regions; with it each holds its slice of the rows (`use_seq_parallel`), which
gives each rank a slice of norms and residuals, and replaces each sum by a gather and a scatter.
"""

from collections.abc import Sequence

from mindspore import nn

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.graph_collectives import (
    CopyToGroup,
    GatherRows,
    ReduceFromGroup,
    ScatterRows,
    StackOverGroup,
)


class TensorParallel:
    """Tensor-parallel group of a graph; `TensorParallel()` is a rank by itself.

    rank, size: position in the group. sequence: rows outside of the parallel regions are split over the group.
    enter: rows outside -> [T, hidden] inside, the same on each rank. leave: partial sums [T, hidden] -> rows outside.
    reduce: partial sums -> sums, the same on each rank. stack: [...] -> [size, ...], every rank's.
    The numbers of rows that are split must be multiples of size.
    """

    def __init__(self, collectives: Collectives | None = None, group: Sequence[int] = (0,), *, sequence: bool = False):
        self.size = len(group)
        self.sequence = sequence and self.size > 1
        self.rank = 0
        self.enter = self.leave = self.reduce = self.stack = nn.Identity()
        if self.size == 1:
            return
        self.rank = tuple(group).index(collectives.world.rank)
        self.reduce, self.stack = ReduceFromGroup(collectives, group), StackOverGroup(collectives, group)
        self.enter, self.leave = CopyToGroup(collectives, group), self.reduce
        if sequence:
            self.enter, self.leave = GatherRows(collectives, group), ScatterRows(collectives, group)

    def share(self, length: int) -> tuple[int, int]:
        """Start and end of this rank's part of `length` equal things."""
        step = length // self.size
        return self.rank * step, (self.rank + 1) * step
