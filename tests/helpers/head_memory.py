"""Prints by how many MiB a process that took the gradients of token log-probs in 2 chunks grows by taking them in 12.

python head_memory.py fused|composed
"""

import sys

import mindspore
import numpy as np
from collecting_head import CollectingHead
from mindspore import Tensor, nn, ops

from mindrlhf.backend.native.operators import open_operators
from mindrlhf.metrics.performance import peak_resident_bytes
from mindrlhf.models.head import TokenLogProbs
from mindrlhf.models.weight import collect_gradients

VOCABULARY, WIDTH, CHUNK, CHUNKS = 131072, 8, 128, 12


class Sum(nn.Cell):
    def __init__(self, fused):
        super().__init__()
        self.head = CollectingHead(VOCABULARY, WIDTH, TokenLogProbs(1.0, CHUNK * VOCABULARY, operators=fused))

    def construct(self, hidden, targets):
        return self.head(hidden, targets, ops.ones_like(targets))[0].sum()


def main(fused) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    subject = Sum(fused)
    trigger = collect_gradients(subject, [subject.head.head], [subject.head.buffer])
    gradient = ops.value_and_grad(subject, 0, trigger)

    @mindspore.jit
    def graph(*inputs):
        return gradient(*inputs)

    def run(chunks: int) -> None:
        hidden = np.ones((chunks * CHUNK, WIDTH), np.float32)
        graph(Tensor(hidden), Tensor(np.zeros(chunks * CHUNK, np.int32)))[0].asnumpy()

    run(2)
    before = peak_resident_bytes()
    run(CHUNKS)
    print((peak_resident_bytes() - before) / 2**20)


if __name__ == "__main__":
    main(open_operators() if sys.argv[1] == "fused" else None)
