"""The one way in and out of a parameter's memory, on the CPU and where the host sees copies only."""

from contextlib import nullcontext

import numpy as np
import pytest
from copying_memory import copying
from mindspore import Parameter, Tensor, nn

from mindrlhf import backend

EACH = pytest.mark.parametrize("memory", [nullcontext, copying])


class Sum(nn.Cell):
    def __init__(self, values):
        super().__init__(auto_prefix=False)
        self.w = Parameter(Tensor(values), name="w")

    def construct(self):
        return self.w.sum()


def ones(*shape) -> np.ndarray:
    return np.ones(shape, np.float32)


@EACH
def test_a_graph_that_has_run_sees_what_is_written(memory):
    with memory():
        graph = Sum(ones(4, 6))
        assert graph().asnumpy() == 24
        backend.write(graph.w, 2 * ones(4, 6))
        assert graph().asnumpy() == 48
        backend.write(graph.w, 0.5)
        assert graph().asnumpy() == 12
        with backend.rewriting({"x": graph.w}) as arrays:
            arrays["x"][0] = 1
        assert graph().asnumpy() == 15
        np.testing.assert_array_equal(backend.read(graph.w)[:, 0], [1, 0.5, 0.5, 0.5])


@EACH
@pytest.mark.parametrize("shape", [(), (0, 3), (5,)])
def test_any_shape(memory, shape):
    with memory():
        parameter = Parameter(Tensor(np.zeros(shape, np.float32)), name="w")
        backend.write(parameter, ones(*shape))
        np.testing.assert_array_equal(backend.read(parameter), ones(*shape))


@EACH
def test_what_is_read_is_not_written_to(memory):
    with memory():
        numbers = backend.read(Parameter(Tensor(ones(3)), name="w"))
        with pytest.raises(ValueError, match="read-only"):
            numbers[0] = 2


@EACH
def test_another_shape_is_refused(memory):
    with memory(), pytest.raises(ValueError, match=r"w has shape \[2, 3\], not \[3\]"):
        backend.write(Parameter(Tensor(ones(2, 3)), name="w"), ones(3))


def test_nothing_is_copied_on_the_cpu():
    parameter = Parameter(Tensor(ones(3)), name="w")
    own = parameter.asnumpy()
    with backend.rewriting({"w": parameter}) as arrays:
        assert np.shares_memory(arrays["w"], own)
    assert np.shares_memory(backend.read(parameter), own)
    backend.write(parameter, 3.0)
    assert own.tolist() == [3.0, 3.0, 3.0]
