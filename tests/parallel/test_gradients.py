"""Sums of gradients over ranks: buckets, and what is written back."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slow_cases import few_of

from mindrlhf.parallel import gradients as module
from mindrlhf.parallel.buckets import buckets
from mindrlhf.parallel.gradients import ReduceGradients


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 100))
def test_buckets_hold_all_in_order_and_are_as_full_as_can_be(sizes, limit):
    groups = buckets(sizes, limit)
    assert [index for group in groups for index in group] == list(range(len(sizes)))
    for group in groups:
        assert len(group) == 1 or sum(sizes[index] for index in group) <= limit
    for group, following in pairwise(groups):
        assert sum(sizes[index] for index in group) + sizes[following[0]] > limit


@pytest.fixture
def two_alike(monkeypatch):
    """Sums over ranks are those of a group of two whose ranks hold the same."""
    import mindspore
    from mindspore import nn

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")

    class Twice(nn.Cell):
        def construct(self, x):
            return x + x

    monkeypatch.setattr(module, "graph_all_reduce", lambda *_: Twice())


def test_gradients_are_replaced_by_their_sums_bucket_by_bucket(two_alike, monkeypatch):
    from mindspore import Parameter, Tensor

    monkeypatch.setattr(module, "BUCKET_NUMBERS", 20)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (7,), (30,), (1,), (2, 3, 2), (5,))]
    gradients = [Parameter(Tensor(value), name=f"gradient.{i}", requires_grad=False) for i, value in enumerate(values)]
    reduce = ReduceGradients(gradients, [((0, 1), [0, 1, 2, 4]), ((0, 2), [3])], None)
    assert reduce.buckets == ((0, 1), (2,), (4,), (3,))
    for factor in (2, 4):
        reduce()
        for place, (gradient, value) in enumerate(zip(gradients, values, strict=True)):
            np.testing.assert_array_equal(gradient.asnumpy(), value if place == 5 else factor * value)


def test_at_least_as_many_buckets_as_asked_for():
    from mindspore import Parameter, Tensor

    gradients = [Parameter(Tensor(np.zeros(5, np.float32)), name=f"gradient.{i}") for i in range(4)]
    for wanted, expected in ((1, ((0, 1, 2, 3),)), (2, ((0, 1), (2, 3))), (4, ((0,), (1,), (2,), (3,)))):
        reduce = ReduceGradients(gradients, [((0,), [0, 1, 2, 3])], None, wanted)
        assert reduce.buckets == expected


@pytest.mark.parametrize("most", few_of([40], [module.GRAPH_PARAMETERS]))
def test_parameters_of_a_deep_model_are_summed_in_several_graphs(two_alike, monkeypatch, most):
    """One graph of all of them is deeper than MindSpore compiles; a full graph is compiled for seconds."""
    from mindspore import Parameter, Tensor

    monkeypatch.setattr(module, "GRAPH_PARAMETERS", most)
    count = module.GRAPH_PARAMETERS + 5
    gradients = [
        Parameter(Tensor(np.full(3, i, np.float32)), name=f"deep.{i}", requires_grad=False) for i in range(count)
    ]
    reduce = ReduceGradients(gradients, [((0, 1), list(range(count)))], None)
    assert [len(bucket) for bucket in reduce.buckets] == [module.GRAPH_PARAMETERS, 5]
    reduce()
    assert [gradient.asnumpy().tolist() for gradient in gradients] == [[2.0 * i] * 3 for i in range(count)]
