"""Load of experts as metrics, over any cut into micro-batches and ranks."""

import math

import numpy as np
import pytest

from mindrlhf.metrics.experts import MOST_SHARES, add_experts, relative_entropy, with_entropy
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.models.expert_layers import BALANCE, LOAD

LOADS = [np.array([4.0, 0, 2, 2], np.float32), np.array([1.0, 3, 0, 0], np.float32)]


def values(*cuts):
    """Results of several ranks' micro-batches, each a load of layer 3."""
    metrics = MetricSet()
    for loads in cuts:
        add_experts(metrics, "actor", [{(3, LOAD): load, (3, BALANCE): np.float32(1.5)} for load in loads])
    return with_entropy(metrics.results())


def test_shares_are_over_all_tokens():
    found = values(LOADS)
    assert found == values(LOADS[:1], LOADS[1:])
    shares = [found[f"actor/expert_load/3/{expert}"] for expert in range(4)]
    np.testing.assert_allclose(shares, np.array([5, 3, 2, 2]) / 12)
    entropy = -sum(share * math.log(share) for share in shares) / math.log(4)
    assert found["actor/expert_entropy/3"] == pytest.approx(entropy)
    assert found["actor/expert_busiest/3"] == pytest.approx(5 / 12)
    assert found["actor/expert_balance"] == pytest.approx(1.5)


def test_many_experts_have_no_metric_each():
    load = np.ones(MOST_SHARES + 1, np.float32)
    assert values([load]) == {
        "actor/expert_balance": 1.5,
        "actor/expert_busiest/3": pytest.approx(1 / (MOST_SHARES + 1)),
        "actor/expert_entropy/3": pytest.approx(1.0),
    }


def test_dense_models_have_none():
    metrics = MetricSet()
    add_experts(metrics, "actor", [{}, {(None, "other"): np.float32(1)}])
    assert with_entropy(metrics.results()) == {}


def test_relative_entropy():
    assert relative_entropy([1.0, 0.0]) == 0
    assert relative_entropy([0.5, 0.5]) == pytest.approx(1)
    assert relative_entropy([1.0]) == 1
