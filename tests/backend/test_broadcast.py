"""Explicit broadcasting: NumPy's values, and no memory that stays with the graph."""

import numpy as np
import psutil
import pytest

from mindrlhf.backend.comm.broadcast import expand

MIB = 2**20
BIG = (1024, 8192)  # 32 MiB


@pytest.fixture(scope="module")
def graph():
    """f -> what it computes as a compiled graph over arrays."""
    import mindspore
    from mindspore import Tensor, nn

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")

    class Graph(nn.Cell):
        def __init__(self, f):
            super().__init__(auto_prefix=False)
            self.f = f

        def construct(self, x, y):
            return self.f(x, y)

    def compiled(f):
        cell = Graph(f)
        return lambda *arrays: cell(*map(Tensor, arrays)).asnumpy()

    return compiled


def expanded_sum(x, y):
    return x + expand(y, x.shape)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (5,), (1,), (3, 1, 1), (1, 4, 1), (4, 1)])
def test_values_are_those_of_numpy(graph, shape):
    rng = np.random.default_rng(0)
    x, y = rng.random((3, 4, 5), np.float32), rng.random(shape, np.float32)
    np.testing.assert_array_equal(graph(expanded_sum)(x, y), x + y)


@pytest.mark.parametrize("shape", [(BIG[0], 1), BIG[1:]], ids=["rows", "columns"])
def test_a_graph_keeps_nothing_of_a_large_operand(graph, shape):
    """Without `expand`, 16 bytes for each element of the result would stay: 128 MiB here."""

    def rows(x, y):
        return expanded_sum(x, y)[0]

    x, y = np.ones(BIG, np.float32), np.ones(shape, np.float32)
    kept = [graph(rows)]
    kept[0](x, y)  # MindSpore's pool has its memory from here on
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        kept.append(graph(rows))
        kept[-1](x, y)
    each = (psutil.Process().memory_info().rss - before) / 3
    assert each < x.nbytes + 24 * MIB, f"{each / MIB:.0f} MiB"  # its last inputs stay with a graph
