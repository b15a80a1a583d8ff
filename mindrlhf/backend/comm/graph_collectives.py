"""Communication inside compiled graphs, with backward rules for tensor parallelism.

Column- and row-parallel layers are joined by a pair of conjugate operators (Shoeybi et al. 2019, arXiv:1909.08053,
section 3, f and g), or, where activations are split by sequence, by another such pair (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2). A plain `ops.AllReduce` would count each gradient `size` times. On CPU only float32
sums exist, so gathering and scattering are built from sums, which is exact: x + 0 = x. Not run on Ascend.
"""

import functools
from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn, ops

from mindrlhf.backend.comm.collectives import Collectives, gather_over
from mindrlhf.backend.comm.shared_memory import share_memory
from mindrlhf.backend.compile.graph import PythonCell
from mindrlhf.backend.devices import find_device


def graph_all_reduce(collectives: Collectives, group: Sequence[int]) -> nn.Cell | ops.AllReduce:
    """Return an operator for Cells that sums over the group, forward and backward.

    All ranks of the group call it together. On CPU, ranks of one host sum in shared memory, if the C++ operators are
    available, and others over sockets.
    """
    if len(group) == 1:
        return nn.Identity()
    if collectives.by_library:
        return ops.AllReduce(group=collectives.graph_group(group))
    if share_memory(collectives.world, tuple(group)):
        return find_device(collectives.world.device_target).operators().shared_sum(group)
    return SocketSum(collectives.world, group)


class SocketSum(PythonCell):
    """Sum over ranks through sockets.

    It adds in the order of ranks, so that each of them has the same bits.
    """

    def __init__(self, world, group: Sequence[int]):
        super().__init__()

        def summed(x: np.ndarray) -> np.ndarray:
            try:
                rows = gather_over(world.channels.sums, x.reshape(-1).view(np.int8), tuple(group), world.rank)
                return functools.reduce(np.add, rows.view(x.dtype)).reshape(x.shape)
            except Exception as error:  # MindSpore would end without its sentence
                world.abort(error)

        self._sum = ops.Custom(summed, out_shape=lambda x: x, out_dtype=lambda x: x, func_type="pyfunc")
        # Without it, independent sums would run in any order, and ranks that begin different sums would wait forever.
        self._sum.add_prim_attr("side_effect_io", True)

    def construct(self, x: Tensor) -> Tensor:
        return self._sum(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self._sum(dout),)


class _OverGroup(nn.Cell):
    """Operator over a group that contains this rank."""

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.all_reduce = graph_all_reduce(collectives, group)
        self.rank = group.index(collectives.world.rank)
        self.size = len(group)


class CopyToGroup(_OverGroup):
    """Entry of a parallel region: identity forward, sum backward (f in arXiv:1909.08053)."""

    def construct(self, x: Tensor) -> Tensor:
        return x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.all_reduce(dout),)


class ReduceFromGroup(_OverGroup):
    """Exit of a parallel region: sum forward, identity backward (g in arXiv:1909.08053)."""

    def construct(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout,)


class StackOverGroup(_OverGroup):
    """Stack of every rank's tensor, without a gradient: [...] -> [size, ...]."""

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__(collectives, group)
        self.own = Tensor(np.eye(self.size, dtype=np.float32)[self.rank])

    def construct(self, x: Tensor) -> Tensor:
        own = self.own.reshape((-1, *(1,) * x.ndim)).astype(x.dtype)
        return self.all_reduce(own * x.reshape((1, *x.shape)))


class GatherRows(nn.Cell):
    """Entry of a parallel region: [T / size, ...] -> [T, ...]; see `ScatterRows`."""

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.stack = StackOverGroup(collectives, group)
        self.scatter = ScatterRows(collectives, group)

    def construct(self, x: Tensor) -> Tensor:
        return self.stack(x).reshape((-1, *x.shape[1:]))

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.scatter(dout),)


class ScatterRows(_OverGroup):
    """Exit of a parallel region: [T, ...] -> [T / size, ...], summed."""

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__(collectives, group)
        self.stack = StackOverGroup(collectives, group)

    def construct(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.size
        return self.all_reduce(x)[self.rank * rows : (self.rank + 1) * rows]

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.stack(dout).reshape((-1, *dout.shape[1:])),)


class TensorParallel:
    """Tensor-parallel group of a graph; `TensorParallel()` is one rank alone.

    A layer's inputs enter its parallel region through `enter`, and its outputs leave through `leave`. Outside of the
    regions, in norms and residuals, all ranks hold all rows without `sequence`; with it (`use_seq_parallel`) each rank
    holds a slice of the rows, and the number of rows must be a multiple of `size`.
    enter: rows outside -> [T, hidden] inside, the same on each rank. leave: partial sums [T, hidden] -> rows outside.
    reduce: partial sums -> sums, the same on each rank. stack: [...] -> [size, ...], the tensors of all ranks.
    """

    def __init__(self, collectives: Collectives | None = None, group: Sequence[int] = (0,), *, sequence: bool = False):
        self.size = len(group)
        self.sequence = sequence and self.size > 1
        self.rank = 0
        self.enter = self.leave = self.reduce = self.stack = nn.Identity()
        if self.size == 1:
            return
        self.rank = tuple(group).index(collectives.world.rank)
        enter, leave = (GatherRows, ScatterRows) if sequence else (CopyToGroup, ReduceFromGroup)
        self.enter = enter(collectives, group)
        self.leave = leave(collectives, group)
        self.reduce = ReduceFromGroup(collectives, group)
        self.stack = StackOverGroup(collectives, group)

    def share(self, length: int) -> tuple[int, int]:
        """Start and end of this rank's equal part of `length` items."""
        step = length // self.size
        return self.rank * step, (self.rank + 1) * step


class ExpertParallel:
    """Expert-parallel group of a graph; `ExpertParallel()` is one rank alone.

    Each rank has its own rows, as many as the others, and a share of the experts. gather: rows [T, ...] -> those of all
    ranks [size * T, ...]. scatter: partial sums [size * T, ...] -> the sums of its own rows [T, ...].
    """

    def __init__(self, collectives: Collectives | None = None, group: Sequence[int] = (0,)):
        self.size = len(group)
        self.rank = 0
        self.gather = self.scatter = nn.Identity()
        if self.size == 1:
            return
        self._collectives = collectives
        self._group = tuple(group)
        self.rank = self._group.index(collectives.world.rank)
        self.gather = GatherRows(collectives, group)
        self.scatter = ScatterRows(collectives, group)

    def largest(self, numbers: np.ndarray) -> np.ndarray:
        """Compute the elementwise maximum over the ranks, outside of graphs."""
        return numbers if self.size == 1 else self._collectives.all_reduce_max(numbers, self._group)

    def any(self, wanted: bool) -> bool:
        """Test if any rank wants something, outside of graphs."""
        return wanted if self.size == 1 else bool(self.largest(np.array([wanted]))[0])
