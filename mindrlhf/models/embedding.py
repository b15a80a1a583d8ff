"""Lookup of token ids in the embedding table, whole or cut over tensor-parallel ranks."""

from mindspore import Parameter, nn, ops

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.models.layer import ScaleGradient
from mindrlhf.models.weight import Weight


class Embedding(nn.Cell):
    """Lookup of token ids int32[T] -> [T, hidden], outside of the parallel regions.

    weight: [vocab, hidden], or [vocab / size, hidden] cut by vocabulary. tied: the head uses the same weight.
    """

    def __init__(self, weight: Parameter, vocab_size: int, tied: bool, shards: TensorParallel):
        super().__init__(auto_prefix=False)
        self.weight = Weight(weight)
        self.cut = weight.shape[0] != vocab_size
        self.first, self.end = shards.share(vocab_size)
        self.rank = shards.rank
        self.size = shards.size
        self.sequence = shards.sequence
        self.leave = shards.leave
        # Every rank looks up the same rows of a whole table, but computes the head's gradient for its own rows only.
        # Both gradients are summed over the ranks together, so the lookup's gradient is divided by their number.
        self.gradient = ScaleGradient(1.0 / shards.size) if tied and shards.size > 1 else nn.Identity()

    def construct(self, ids):
        if self.cut:
            inside = ops.logical_and(ids >= self.first, ids < self.end)
            rows = self.weight.rows(ops.select(inside, ids - self.first, ops.zeros_like(ids)))
            return self.leave(rows * expand(inside.astype(rows.dtype).reshape((-1, 1)), rows.shape))
        if self.sequence:
            share = ids.shape[0] // self.size
            return self.weight.rows(ids[self.rank * share : (self.rank + 1) * share])
        return self.gradient(self.weight.rows(ids))
