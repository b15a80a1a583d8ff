"""Masks of dropout in a graph: those of their definition, the wanted share, unrelated elements, parts of the whole."""

import numpy as np
import pytest
from dropped_weight import mask
from mindspore import GRAPH_MODE, Tensor, nn, set_context

from mindrlhf.models.dropout import InputDropout
from mindrlhf.random_numbers import random_keys

ROWS, COLUMNS = random_keys(1, 2, np.arange(400)), 300


class Masks(nn.Cell):
    def __init__(self, *dropouts: InputDropout):
        super().__init__(auto_prefix=False)
        self.dropouts = nn.CellList(list(dropouts))

    def construct(self, x, rows):
        return tuple(dropout(x, rows) for dropout in self.dropouts)


def kept(*dropouts: InputDropout, rows=ROWS, count: int | None = None) -> list[np.ndarray]:
    """bool[count, columns] of each map, for an input of the last `count` rows."""
    set_context(mode=GRAPH_MODE, device_target="CPU")
    x = np.random.default_rng(0).normal(size=(count or len(rows), dropouts[0].keys.shape[0])).astype(np.float32)
    found = [out.asnumpy() for out in Masks(*dropouts)(Tensor(x), Tensor(rows))]
    for out in found:
        np.testing.assert_array_equal(out[out != 0], x[out != 0])
    return [out != 0 for out in found]


def standardised(kept: np.ndarray, share: float) -> np.ndarray:
    return (kept - (1 - share)) / np.sqrt(share * (1 - share))


def test_masks_are_those_of_their_definition():
    names = ("model.layers.0.attention.wq", "model.layers.1.attention.wq")
    found = kept(*(InputDropout(name, 0.3, range(COLUMNS)) for name in names))
    for name, of_map in zip(names, found, strict=True):
        np.testing.assert_array_equal(of_map, mask(ROWS, name, 0.3, COLUMNS))


def test_an_input_has_the_last_rows_and_a_rank_its_columns():
    whole, last = kept(InputDropout("w2", 0.5, range(COLUMNS))), kept(InputDropout("w2", 0.5, range(100, 200)), count=7)
    np.testing.assert_array_equal(last[0], whole[0][-7:, 100:200])


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_the_share_is_dropped_and_elements_are_unrelated(share):
    """Means and products of standardised elements are about normal: six deviations of each are many."""
    first, second = (
        standardised(of_map, share)
        for of_map in kept(*(InputDropout(name, share, range(COLUMNS)) for name in ("wq", "wk")))
    )
    for of_map in (first, second):
        assert abs(of_map.mean()) < 6 / np.sqrt(of_map.size)
        for axis, size in enumerate(of_map.shape):
            means = of_map.mean(axis) * np.sqrt(size)
            assert np.abs(means).max() < 6
            assert 0.8 < means.std() < 1.2
    products = {
        "maps": first * second,
        "rows": first[1:] * first[:-1],
        "columns": first[:, 1:] * first[:, :-1],
        "diagonals": first[1:, 1:] * first[:-1, :-1],
    }
    for name, product in products.items():
        assert abs(product.mean()) < 6 / np.sqrt(product.size), name
    for one in (first, first.T):
        pairs = (one @ one.T)[np.triu_indices(len(one), 1)] / np.sqrt(one.shape[1])
        assert 0.95 < pairs.std() < 1.05


@pytest.mark.parametrize(("share", "expected"), [(1e-12, True), (1 - 1e-12, False)])
def test_extreme_shares(share, expected):
    assert (kept(InputDropout("wo", share, range(COLUMNS)))[0] == expected).all()
