import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.metrics.metric_set import MetricSet, reduce

values_and_masks = st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=40)


def filled(rows) -> MetricSet:
    metrics = MetricSet()
    values, mask = (np.array(column, dtype=np.float64) for column in zip(*rows, strict=True))
    metrics.add_summary("length", values, mask)
    metrics.add_std("length/std", values, mask)
    metrics.add("loss", float((values * mask).sum()), float(mask.sum()))
    metrics.add_total("count", mask.sum())
    return metrics


def cut(rows, places) -> list:
    edges = sorted({0, len(rows), *(place % len(rows) for place in places)})
    return [rows[start:end] for start, end in pairwise(edges)]


def merged(parts) -> MetricSet:
    whole = MetricSet()
    for part in parts:
        whole.merge(part)
    return whole


@settings(deadline=None)
@given(values_and_masks, st.lists(st.integers(0, 100), max_size=6), st.randoms())
def test_result_does_not_depend_on_how_the_batch_was_cut(rows, places, random):
    parts = [filled(piece) for piece in cut(rows, places)]
    random.shuffle(parts)
    middle = len(parts) // 2
    grouped = merged([merged(parts[:middle]), merged(parts[middle:])])
    whole = filled(rows).results()
    assert grouped.results() == pytest.approx(whole, rel=1e-9, abs=1e-9)
    chosen = np.array([value for value, kept in rows if kept], dtype=np.float64)
    assert whole["count"] == chosen.size
    if chosen.size:
        assert whole["length/mean"] == pytest.approx(chosen.mean(), rel=1e-9, abs=1e-9)
        assert (whole["length/max"], whole["length/min"]) == (chosen.max(), chosen.min())
    else:
        assert set(whole) == {"count"}
    if chosen.size > 1:
        assert whole["length/std"] == pytest.approx(chosen.std(ddof=1), rel=1e-6, abs=1e-9)
    else:
        assert "length/std" not in whole


@settings(deadline=None)
@given(values_and_masks, st.lists(st.integers(0, 100), max_size=4))
def test_reduce_over_ranks_equals_one_process(rows, places):
    ranks = [filled(piece) for piece in cut(rows, places)]
    ranks.append(MetricSet())  # a rank without rows, such as one that only holds a copy
    results = [reduce(rank, lambda own: ranks).results() for rank in ranks]
    assert results[0] == pytest.approx(filled(rows).results(), rel=1e-9, abs=1e-9)
    assert all(result == results[0] for result in results), "every rank holds exactly the same"


def test_reduce_sends_what_this_rank_holds():
    metrics = filled([(1.0, True), (3.0, True)])
    received = []
    reduce(metrics, lambda own: received.append(own) or [own])
    assert [one.results() for one in received] == [metrics.results()]


def test_what_travels_is_exact_with_nan_and_infinities():
    metrics = MetricSet()
    for name, value in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf), ("third", 1 / 3)):
        metrics.add(name, value)
        metrics.add_max(f"max/{name}", value)
    back = pickle.loads(pickle.dumps(metrics)).results()
    assert back == pytest.approx(metrics.results(), nan_ok=True, rel=0, abs=0)
    assert len(back) == 8


def test_mean_over_nothing_is_left_out_and_zero_division_shows():
    metrics = MetricSet()
    metrics.add("nothing", 0.0, 0.0)
    metrics.add_values("empty", np.zeros((0,)))
    metrics.add_summary("masked", np.ones(3), np.zeros(3))
    metrics.add("broken", -2.0, 0.0)
    assert metrics.results() == {"broken": -math.inf}


def test_padding_cannot_leak():
    metrics = MetricSet()
    metrics.add_summary("x", np.array([[1.0, np.nan], [3.0, np.inf]]), np.array([[1, 0], [1, 0]]))
    assert metrics.results() == {"x/mean": 2.0, "x/max": 3.0, "x/min": 1.0}


def test_nan_in_the_data_shows_in_every_order():
    for values in ([math.nan, 1.0], [1.0, math.nan]):
        metrics = MetricSet()
        for value in values:
            metrics.add_summary("x", np.array([value]))
        assert all(math.isnan(value) for value in metrics.results().values())
        assert len(metrics.results()) == 3


def test_deviation_of_equal_values_far_from_zero_is_zero():
    metrics = MetricSet()
    for _ in range(10):
        metrics.add_std("x", np.full(3, 1e6 + 0.1, dtype=np.float64))
    assert metrics.results()["x"] == pytest.approx(0.0, abs=1e-9)


def test_a_name_keeps_its_kind():
    metrics = MetricSet()
    metrics.add("x", 1.0)
    with pytest.raises(ValueError, match="x was added as ratio before and as max now"):
        metrics.add_max("x", 2.0)
    assert metrics.results() == {"x": 1.0}
