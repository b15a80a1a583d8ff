"""Results of tools: what the model reads of any kind of value."""

import datetime
from decimal import Decimal
from pathlib import PurePosixPath

import numpy as np
import pytest

from mindrlhf.environments.results import result_text


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("né 😀", "né 😀"),
        ("", ""),
        (None, "null"),
        (True, "true"),
        (10**30, str(10**30)),
        ({"é": [1, None]}, '{"é": [1, null]}'),
        ((1, 2), "[1, 2]"),
        ([(1, (2,))], "[[1, [2]]]"),
        ({1: (2,)}, '{"1": [2]}'),
        ({3, 1}, "[1, 3]"),
        (frozenset("b"), '["b"]'),
        (np.float64(0.5), "0.5"),
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        (np.bool_(True), "true"),
        (np.arange(3), "[0, 1, 2]"),
        ({"a": np.float32(0.25), "b": np.ones((1, 2))}, '{"a": 0.25, "b": [[1.0, 1.0]]}'),
        (Decimal("1.50"), '"1.50"'),
        ({"day": datetime.date(2024, 1, 2)}, '{"day": "2024-01-02"}'),
        (PurePosixPath("a/b"), '"a/b"'),
    ],
)
def test_what_a_model_reads(result, text):
    assert result_text(result) == text


@pytest.mark.parametrize("result", [b"x", object(), [b"x"], {"a": object()}, 1j, range(2), lambda: 0])
def test_what_has_no_text_is_named(result):
    with pytest.raises(TypeError, match=r"it returned (bytes|object|complex|range|function), and not text"):
        result_text(result)
