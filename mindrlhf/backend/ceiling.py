"""Rates of matrix products that this process reaches, measured once."""

import time
from functools import cache

import numpy as np

from mindrlhf.backend.devices import find_device

ATTEMPTS = 3  # the best one counts
LEAST_S = 0.05  # of each


def matmul_ceiling(device_target: str, dtype: str = "float32") -> float:
    """Measure floating-point operations per second of square matrix products, in about 0.2 s.

    dtype: input dtype of the products. Ranks of one host measure at about the same time, so each one measures its share
    of the host. The Ascend branch has not been run.
    """
    size = find_device(device_target).ceiling_size
    return product_rate(device_target, dtype, size, size, size)


@cache
def product_rate(
    device_target: str, dtype: str, rows: int, inner: int, columns: int, decoded: str | None = None
) -> float:
    """Measure floating-point operations per second of [rows, inner] x [columns, inner].

    decoded: dtype of the weights in decode steps; if given, the fused decode product is measured, where available.
    """
    from mindspore import Tensor

    from mindrlhf.backend.compile.graph import Graph
    from mindrlhf.backend.native.packing import row_words
    from mindrlhf.backend.operators import dtype_named

    used = find_device(device_target).operators(dtype, decoded or dtype)
    decodes = decoded is not None and used.fused

    class Product(Graph):
        def __init__(self):
            super().__init__("ceiling")
            self.linear = used.decode_logits if decodes else used.linear

        def construct(self, x, weight):
            return self.linear(x, weight)

    kind = dtype_named(used.activations)
    x, weight = (Tensor(np.full((size, inner), 1.0 / inner, np.float32), kind) for size in (rows, columns))
    if decodes and decoded != "float32":
        weight = Tensor(np.zeros((columns, row_words(decoded, inner)), np.int32))
    graph = Product()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            product = graph(x, weight)
        product.asnumpy()  # waits for the device
        return time.perf_counter() - start

    seconds(1)
    count = max(1, int(LEAST_S / seconds(1)))
    return 2.0 * rows * inner * columns * count / min(seconds(count) for _ in range(ATTEMPTS))
