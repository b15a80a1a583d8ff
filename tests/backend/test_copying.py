"""Copies past the caches, against plain ones."""

import numpy as np
import pytest

from mindrlhf.backend.native import Library, copying


@pytest.fixture(params=["built", "missing"])
def copy(request, monkeypatch):
    if request.param == "missing":
        monkeypatch.setattr(copying, "library", lambda: Library(None, "not built"))
    return copying.stream_copy


def test_any_place_and_length(copy):
    """Nothing beside the target is written."""
    rng = np.random.default_rng(0)
    source = rng.integers(0, 256, 4096, np.uint8)
    for length in (0, 1, 63, 64, 65, 127, 128, 1000, 3000):
        for start in (0, 1, 31, 32, 63):
            target = np.full(4096, 7, np.uint8)
            expected = target.copy()
            expected[start + 5 : start + 5 + length] = source[start : start + length]
            copy(target[start + 5 : start + 5 + length], source[start : start + length])
            np.testing.assert_array_equal(target, expected)


def test_lengths_that_differ_are_refused(copy):
    with pytest.raises(ValueError, match="3 bytes do not fill 4"):
        copy(np.zeros(4, np.uint8), np.zeros(3, np.uint8))
