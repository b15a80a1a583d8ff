"""Prints by how many MiB a process that took the gradients of token log-probs in 2 chunks grows by taking them in 12.

python head_memory.py fused|composed
"""

import sys

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops

from mindrlhf.backend.native.operators import operators
from mindrlhf.metrics.performance import peak_resident_bytes
from mindrlhf.models.head import TokenLogProbs

VOCABULARY, WIDTH, CHUNK, CHUNKS = 131072, 8, 128, 12


class Sum(nn.Cell):
    def __init__(self, fused):
        super().__init__()
        self.token_log_probs = TokenLogProbs(1.0, CHUNK * VOCABULARY, fused=fused)

    def construct(self, hidden, head, targets):
        return self.token_log_probs(hidden, head, targets, ops.ones_like(targets))[0].sum()


def main(fused) -> None:
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    gradient = ops.value_and_grad(Sum(fused), (0, 1))

    @mindspore.jit
    def graph(*inputs):
        return gradient(*inputs)

    def run(chunks: int) -> None:
        hidden, head = np.ones((chunks * CHUNK, WIDTH), np.float32), np.ones((VOCABULARY, WIDTH), np.float32)
        graph(Tensor(hidden), Tensor(head), Tensor(np.zeros(chunks * CHUNK, np.int32)))[0].asnumpy()

    run(2)
    before = peak_resident_bytes()
    run(CHUNKS)
    print((peak_resident_bytes() - before) / 2**20)


if __name__ == "__main__":
    main(operators() if sys.argv[1] == "fused" else None)
