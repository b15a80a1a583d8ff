import time

import mindspore  # noqa: F401  before the clock starts
import numpy as np

from mindrlhf.backend.ceiling import SIZE, matmul_ceiling


def test_the_ceiling_is_what_a_product_of_numpy_comes_near_to():
    start = time.perf_counter()
    ceiling = matmul_ceiling("CPU")
    assert time.perf_counter() - start < 10
    matrix = np.ones((SIZE["CPU"],) * 2, np.float32)
    matrix @ matrix
    start = time.perf_counter()
    matrix @ matrix
    numpy = 2 * SIZE["CPU"] ** 3 / (time.perf_counter() - start)
    assert numpy / 10 < ceiling < numpy * 10, "of the same order, on a machine that does other things too"
    assert matmul_ceiling("CPU") == ceiling, "measured once"
