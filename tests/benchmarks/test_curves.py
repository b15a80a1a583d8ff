"""Curves beside the peer: what is made of them, from curves that are known."""

import sys

import numpy as np
import pytest
from workers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from curves import Curve, compared, draw, to_accuracy


def curve(last: float, seconds: float, *right: int) -> Curve:
    """40 steps, whose rewards are `last` in the second half; 10 of 100 answers right at first, then `right`."""
    measured = [(20 * number, one, 100) for number, one in enumerate((10, *right))]
    return Curve([0.1] * 20 + [last] * 20, [seconds] * 40, measured)


def test_time_to_an_accuracy_lies_between_measurements():
    slow = curve(0.5, 60.0, 30, 50)
    assert [to_accuracy(slow, share) for share in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.9)] == [0, 0, 10, 20, 30, 40, 40]
    assert to_accuracy(curve(0.5, 30.0, 30, 50), 0.4) == 15


def test_sides_are_in_one_band_if_they_differ_by_no_more_than_seeds_and_chance():
    ours = [curve(0.5, 6.0, 30, 50), curve(0.54, 6.0, 30, 48)]
    found = compared({"ours": ours, "peer": [curve(0.49, 24.0, 30, 50), curve(0.52, 24.0, 28, 50)]})
    assert found["difference"] == pytest.approx(0.015)
    assert found["seeds_differ"] == pytest.approx(0.04)
    assert found["in_one_band"]
    assert found["accuracy_of_both"] == 0.48
    assert found["time_ratio"] == pytest.approx(0.25, rel=0.06)
    assert found["seconds_a_step"] == {"ours": 6.0, "peer": 24.0}
    apart = compared({"ours": ours, "peer": [curve(0.3, 24.0, 30, 50)] * 2})
    assert not apart["in_one_band"]


def test_the_figure_is_drawn(tmp_path):
    rng = np.random.default_rng(0)
    curves = [Curve(list(rng.random(40)), [6.0] * 40, [(0, 10, 100), (20, 30, 100), (40, 50, 100)]) for _ in range(2)]
    draw({"ours": curves, "peer": curves}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000
