"""The sum of gradients over ranks, in place, as compiled graphs."""

from collections.abc import Iterator, Sequence

from mindspore import Parameter, Tensor, nn, ops

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.graph_collectives import graph_all_reduce
from mindrlhf.parallel.buckets import buckets

# Gradients are sent in a few large buffers: a reduction has a fixed cost of milliseconds on CPU.
BUCKET_NUMBERS = 4 * 2**20
# Loops over parameters are unrolled, each turn one level deeper, and MindSpore compiles 1000 levels at most.
GRAPH_PARAMETERS = 128

Bucket = tuple[int, ...]


class ReduceGradients:
    """Sum parameters over groups of ranks in place.

    groups: (ranks, indices of `gradients`), the same on every rank of a group and in an order in which no rank waits
    for another (`Partition.gradient_groups`). Each group's gradients are sent in at least `aggregation_groups` buckets,
    none larger than `BUCKET_NUMBERS` or one parameter, and none of more than `GRAPH_PARAMETERS` parameters.
    """

    def __init__(
        self,
        gradients: Sequence[Parameter],
        groups: Sequence[tuple[tuple[int, ...], list[int]]],
        collectives: Collectives,
        aggregation_groups: int = 1,
    ):
        self.buckets: tuple[Bucket, ...] = ()
        reductions: list[nn.Cell | ops.AllReduce] = []
        for group, indices in groups:
            sizes = [gradients[index].size for index in indices]
            limit = min(BUCKET_NUMBERS, -(-sum(sizes) // aggregation_groups))
            all_reduce = graph_all_reduce(collectives, group)
            for bucket in _shortened(buckets(sizes, limit)):
                self.buckets += (tuple(indices[place] for place in bucket),)
                reductions.append(all_reduce)
        counts = [len(bucket) for bucket in self.buckets]
        self._graphs = [
            _Reduction(gradients, [self.buckets[place] for place in part], [reductions[place] for place in part])
            for part in buckets(counts, GRAPH_PARAMETERS)
        ]

    def __call__(self) -> None:
        for graph in self._graphs:
            graph()


def _shortened(found: Sequence[Bucket]) -> Iterator[Bucket]:
    """Cut buckets of more than `GRAPH_PARAMETERS` parameters."""
    for bucket in found:
        for start in range(0, len(bucket), GRAPH_PARAMETERS):
            yield bucket[start : start + GRAPH_PARAMETERS]


class _Reduction(nn.Cell):
    """Graph that sums some buckets, one after the other.

    reductions: for each bucket.
    """

    def __init__(self, gradients: Sequence[Parameter], found: Sequence[Bucket], reductions: Sequence):
        super().__init__(auto_prefix=False)
        self.gradients = gradients
        self.buckets = tuple(found)
        self.reduce = tuple(reductions)

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
