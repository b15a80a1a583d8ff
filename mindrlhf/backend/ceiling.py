"""Rate of matrix products that this process reaches, measured once."""

import time
from functools import cache

import numpy as np

SIZE = {"CPU": 1024, "Ascend": 8192}  # of the square matrices
ATTEMPTS, LEAST_S = 3, 0.05  # best of ATTEMPTS runs of at least LEAST_S seconds


@cache
def matmul_ceiling(device_target: str, dtype: str = "float32") -> float:
    """Measure floating-point operations per second of square matrix products, in about 0.2 s.

    dtype: that of the weights in compute. Ranks of one host measure at about the same time, and each of them finds its
    part of the host. The Ascend branch has not been run.
    """
    import mindspore
    from mindspore import Tensor

    from mindrlhf.backend import kernels
    from mindrlhf.backend.compile.graph import Graph

    class Product(Graph):
        def __init__(self):
            super().__init__("ceiling")
            self.linear = kernels(device_target).best.linear

        def construct(self, x, weight):
            return self.linear(x, weight)

    size = SIZE[device_target]
    matrix = Tensor(np.full((size, size), 1.0 / size, np.float32), getattr(mindspore, dtype))
    graph = Product()

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            product = graph(matrix, matrix)
        product.asnumpy()  # waits for the device
        return time.perf_counter() - start

    seconds(1)
    count = max(1, int(LEAST_S / seconds(1)))
    return 2.0 * size**3 * count / min(seconds(count) for _ in range(ATTEMPTS))
