"""The sum of gradients over ranks, in place, as one compiled graph."""

from collections.abc import Sequence

from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.graph_collectives import graph_all_reduce
from mindrlhf.parallel.buckets import buckets

# Gradients are sent in a few large buffers: a reduction has a fixed cost of milliseconds on CPU.
BUCKET_NUMBERS = 4 * 2**20


class ReduceGradients(nn.Cell):
    """Graph that sums parameters over groups of ranks in place.

    groups: (ranks, indices of `gradients`), the same on every rank of a group and in an order in which no rank waits
    for another (`Partition.gradient_groups`). Each group's gradients are sent in at least `aggregation_groups` buckets,
    none larger than `BUCKET_NUMBERS` or one parameter.
    """

    def __init__(
        self,
        gradients: Sequence[Parameter],
        groups: Sequence[tuple[tuple[int, ...], list[int]]],
        collectives: Collectives,
        aggregation_groups: int = 1,
    ):
        super().__init__(auto_prefix=False)
        self.gradients = gradients
        self.buckets, self.reduce = (), ()
        for group, indices in groups:
            sizes = [gradients[index].size for index in indices]
            limit = min(BUCKET_NUMBERS, -(-sum(sizes) // aggregation_groups))
            all_reduce = graph_all_reduce(collectives, group)
            for bucket in buckets(sizes, limit):
                self.buckets += (tuple(indices[place] for place in bucket),)
                self.reduce += (all_reduce,)

    def construct(self):
        done = Tensor(0.0)
        for number, bucket in enumerate(self.buckets):
            flat = ()
            for i in bucket:
                flat += (ops.depend(self.gradients[i], done).reshape((-1,)),)
            summed = self.reduce[number](ops.concat(flat))
            start = 0
            for i in bucket:
                size = self.gradients[i].size
                part = summed[start : start + size].reshape(self.gradients[i].shape)
                done = ops.depend(done, ops.assign(self.gradients[i], part))
                start += size
        return done
