"""The fused CPU operators against the compositions of basic operators that they stand for, values and gradients."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from mindrlhf.backend import native
from mindrlhf.backend.operators import COMPOSED


def draw(*shape, seed=0):
    return Tensor(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32))


class RmsNorm(nn.Cell):
    def __init__(self, backend):
        super().__init__()
        self.run = backend.rms_norm

    def construct(self, x, weight):
        return self.run(x, weight, 1e-6)


class Linear(nn.Cell):
    def __init__(self, backend):
        super().__init__()
        self.run = backend.linear

    def construct(self, x, weight):
        return self.run(x, weight)


def values_and_gradients(graph, inputs):
    out = graph(*inputs).asnumpy()
    gradients = ops.GradOperation(get_all=True, sens_param=True)(graph)(*inputs, draw(*out.shape, seed=9))
    return [out, *(gradient.asnumpy() for gradient in gradients)]


@pytest.mark.parametrize("shape", [(300, 96), (1, 250, 4, 16)])
def test_a_norm_equals_the_composition(fused, shape):
    inputs = draw(*shape), draw(shape[-1])
    expected = values_and_gradients(RmsNorm(COMPOSED), inputs)
    for found, one in zip(values_and_gradients(RmsNorm(fused), inputs), expected, strict=True):
        assert np.abs(one).max() > 0.1
        np.testing.assert_allclose(found, one, rtol=0, atol=2e-6 * np.abs(one).max())


@pytest.mark.parametrize(("rows", "outputs"), [(700, 50), (7, 90)])
def test_a_linear_map_equals_the_composition(fused, rows, outputs):
    inputs = draw(rows, 77), draw(outputs, 77)
    expected = Linear(COMPOSED)(*inputs).asnumpy()
    np.testing.assert_allclose(Linear(fused)(*inputs).asnumpy(), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_a_row_of_a_linear_map_has_the_same_bits_in_any_company(fused):
    """oneDNN's kernels leave rows over, which may have other last bits."""
    x, weight = draw(500, 77), draw(90, 77)
    every = Linear(fused)(x, weight).asnumpy()
    for rows in (16, 17, 25, 50, 76, 90, 148, 149, 190, 402, 499):
        assert Linear(fused)(x[:rows], weight).asnumpy().tobytes() == every[:rows].tobytes(), rows


def test_an_update_of_some_rows_equals_the_composition(fused):
    """Of tensors larger and smaller than a piece; the gradients of other rows are zeroed too."""
    shapes, rows = [(40, 700), (9, 8), (5,)], ((10, 30), (0, 9), (2, 4))
    numbers = [Tensor(np.float32(value)) for value in (1e-2, 0.9, 0.95, 1e-6, 0.3, 0.7)]

    class Norm(nn.Cell):
        def __init__(self, backend, gradients):
            super().__init__(auto_prefix=False)
            self.gradients, self.squared_norm = gradients, backend.squared_norm

        def construct(self):
            return self.squared_norm(self.gradients)

    class Update(nn.Cell):
        def __init__(self, backend, state):
            super().__init__(auto_prefix=False)
            self.state, self.adamw = state, backend.adamw

        def construct(self, *numbers):
            parameters, first, second, gradients = self.state
            return self.adamw(parameters, gradients, first, second, (True, False, True), rows, numbers)

    found = []
    for backend in (fused, COMPOSED):
        state = []
        for kind in range(4):
            own = [
                shape if kind == 3 else (end - start, *shape[1:])
                for shape, (start, end) in zip(shapes, rows, strict=True)
            ]
            arrays = [draw(*shape, seed=kind) for shape in own]
            arrays = [ops.square(array) for array in arrays] if kind == 2 else arrays
            state.append(ParameterTuple([Parameter(a, name=f"{kind}.{i}") for i, a in enumerate(arrays)]))
        norm = Norm(backend, state[3])().asnumpy()
        Update(backend, state)(*numbers).asnumpy()
        found.append([norm, *(p.asnumpy().copy() for kind in state for p in kind)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-6)
    assert not any(gradient.any() for gradient in found[0][-3:])


def test_not_a_number_stays_one(fused):
    x = draw(4, 96).asnumpy().copy()
    x[2, 5] = np.nan
    bad = np.isnan(RmsNorm(fused)(Tensor(x), draw(96)).asnumpy())
    assert bad[2].all()
    assert not bad[:2].any()


def test_operators_may_run_at_the_same_time(fused):
    """Four threads, each with its own products: one at a time has the team's help, the others do without."""
    linear = ctypes.CDLL(str(native.library().path)).linear

    def products(seed: int) -> float:
        x, w = (np.random.default_rng(seed + i).standard_normal((64, 96)).astype(np.float32) for i in range(2))
        y, worst = np.zeros((64, 64), np.float32), 0.0
        params = (ctypes.c_void_p * 3)(*(array.ctypes.data for array in (x, w, y)))
        sizes = [(ctypes.c_int64 * 2)(*array.shape) for array in (x, w, y)]
        shapes = (ctypes.POINTER(ctypes.c_int64) * 3)(*(ctypes.cast(s, ctypes.POINTER(ctypes.c_int64)) for s in sizes))
        ndims = (ctypes.c_int * 3)(2, 2, 2)
        for _ in range(100):
            y[...] = np.nan
            assert linear(3, params, ndims, shapes, None, None, None) == 0
            worst = max(worst, np.abs(y - x @ w.T).max())
        return worst

    with ThreadPoolExecutor(4) as pool:
        worst = list(pool.map(products, range(0, 40, 10)))
    assert max(worst) < 1e-4, worst
