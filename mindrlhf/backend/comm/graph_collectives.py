"""Communication inside compiled graphs, with backward rules for tensor parallelism.

Column- and row-parallel layers are joined by a pair of conjugate operators (Shoeybi et al. 2019, arXiv:1909.08053,
section 3, f and g), or, where activations are split by sequence, by another such pair (Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2, g and its conjugate). A plain `ops.AllReduce` differentiates to another AllReduce,
which counts each gradient size times when the ranks go on to compute the same loss; these do not.

Only float32 sums exist on CPU, so gathering and scattering are made of them, exactly: x + 0 = x. All ranks must run the
same communication in the same order: give them the same graph. The Ascend side uses the same operators and has not been
run here.
"""

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor, nn, ops

from mindrlhf.backend.comm.collectives import Collectives


def graph_all_reduce(collectives: Collectives, group: Sequence[int]) -> nn.Cell | ops.AllReduce:
    """Return a function that sums a tensor over the group, for Cells.

    It is the identity for a group of one.
    Its gradient is MindSpore's: the sum over the group of the incoming gradients.
    """
    return nn.Identity() if len(group) == 1 else ops.AllReduce(group=collectives.graph_group(group))


class CopyToGroup(nn.Cell):
    """Entry of a parallel region: identity forward, sum over the group backward.

    It is f in arXiv:1909.08053.
    Takes a tensor that is the same on each rank of the group.
    """

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.all_reduce = graph_all_reduce(collectives, group)

    def construct(self, x: Tensor) -> Tensor:
        return x

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.all_reduce(dout),)


class ReduceFromGroup(nn.Cell):
    """Exit of a parallel region: sum over the group forward, identity backward.

    It is g in arXiv:1909.08053.
    Gives a tensor that is the same on each rank of the group.
    """

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.all_reduce = graph_all_reduce(collectives, group)

    def construct(self, x: Tensor) -> Tensor:
        return self.all_reduce(x)

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (dout,)


class StackOverGroup(nn.Cell):
    """Stack of every rank's float32 tensor: [...] -> [size, ...].

    It is in rank order, the same on each rank, without a gradient.
    """

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.all_reduce = graph_all_reduce(collectives, group)
        self.own = Tensor(np.eye(len(group), dtype=np.float32)[group.index(collectives.world.rank)])

    def construct(self, x: Tensor) -> Tensor:
        own = self.own.reshape((-1, *(1,) * x.ndim))
        return self.all_reduce(own * x.reshape((1, *x.shape)))


class GatherRows(nn.Cell):
    """Entry of a parallel region from rows that are split over ranks.

    [T / size, ...] -> [T, ...] in rank order. Backward, each rank's gradient of all rows is summed and every rank
    keeps its own rows.
    """

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.stack = StackOverGroup(collectives, group)
        self.scatter = ScatterRows(collectives, group)

    def construct(self, x: Tensor) -> Tensor:
        return self.stack(x).reshape((-1, *x.shape[1:]))

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.scatter(dout),)


class ScatterRows(nn.Cell):
    """Exit of a parallel region to split rows.

    [T, ...] is summed over the group, and each rank keeps its [T / size, ...].
    Backward, the gradients of all rows are gathered.
    """

    def __init__(self, collectives: Collectives, group: Sequence[int]):
        super().__init__()
        self.all_reduce = graph_all_reduce(collectives, group)
        self.stack = StackOverGroup(collectives, group)
        self.rank, self.size = group.index(collectives.world.rank), len(group)

    def construct(self, x: Tensor) -> Tensor:
        rows = x.shape[0] // self.size
        return self.all_reduce(x)[self.rank * rows : (self.rank + 1) * rows]

    def bprop(self, x: Tensor, out: Tensor, dout: Tensor) -> tuple[Tensor]:
        return (self.stack(dout).reshape((-1, *dout.shape[1:])),)
