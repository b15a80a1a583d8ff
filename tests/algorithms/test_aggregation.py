"""Aggregation against each mode's definition, and its invariance under every cut of a batch."""

from functools import cache

import numpy as np
import pytest

from mindrlhf.algorithms.aggregation import MODES, batch_totals, token_weights
from mindrlhf.algorithms.losses import policy_loss
from mindrlhf.errors import UserError

LIMIT = 7


def definition(mode, rows, count_empty_rows):
    """The mode's loss of a list of rows float64[R], written with means."""
    counted = [row for row in rows if count_empty_rows or row.size]
    flat = np.concatenate([np.zeros(0), *rows])
    if not flat.size:
        return 0.0
    return {
        "token-mean": flat.mean(),
        "seq-mean-token-mean": np.mean([row.mean() if row.size else 0.0 for row in counted]),
        "seq-mean-token-sum": np.mean([row.sum() for row in counted]),
        "seq-mean-token-sum-norm": flat.sum() / LIMIT,
        "dr_grpo": np.mean([row.sum() / LIMIT for row in rows]),
    }[mode]


def matrix(rows, width):
    padded, mask = np.zeros((len(rows), width)), np.zeros((len(rows), width), np.float32)
    for index, row in enumerate(rows):
        padded[index, : row.size], mask[index, : row.size] = row, 1.0
    return padded, mask


@pytest.mark.parametrize("count_empty_rows", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_any_cut_gives_the_definition(mode, count_empty_rows):
    """Rows are spread over ranks and micro-batches at random, padded to any width and with rows that only pad."""
    rng = np.random.default_rng(7)
    for _ in range(200):
        rows = [rng.normal(size=rng.integers(0, LIMIT + 1)) for _ in range(rng.integers(1, 12))]
        ranks = [[rows[i] for i in part] for part in np.array_split(rng.permutation(len(rows)), rng.integers(1, 4))]
        totals = sum(batch_totals([row.size for row in rank]) for rank in ranks)
        loss = 0.0
        for rank in ranks:
            for part in np.array_split(np.arange(len(rank)), rng.integers(1, 4)):
                micro = [rank[i] for i in part]
                width = max([1, *(row.size for row in micro)]) + rng.integers(0, 3)
                losses, mask = matrix([*micro, *[np.zeros(0)] * rng.integers(0, 3)], width)
                weights = token_weights(mask, mode, totals, max_tokens=LIMIT, count_empty_rows=count_empty_rows)
                assert weights.dtype == np.float32
                assert not weights[mask == 0].any()
                loss += (weights * losses).sum()
        assert loss == pytest.approx(definition(mode, rows, count_empty_rows), rel=1e-6, abs=1e-6)


@pytest.fixture(scope="module")
def compiled(compile_loss):
    """name -> two graphs of a loss, for two shapes."""
    return cache(lambda name: (compile_loss(policy_loss(name).losses), compile_loss(policy_loss(name).losses)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["clip", "gspo", "geo_mean"])
def test_any_cut_gives_the_same_gradient(mode, name, compiled, batches):
    """Loss and gradient of one graph over a batch equal the sums over its pieces in another shape."""
    whole, pieces = compiled(name)
    rng = np.random.default_rng(8)
    log_probs, old = -rng.exponential(size=(2, 8, 6))
    old = log_probs + 0.3 * old
    mask, lengths = batches.mask[0], batches.lengths[0]
    advantages = np.repeat(rng.normal(size=(8, 1)), 6, axis=1)
    totals = batch_totals(lengths[:3]) + batch_totals(lengths[3:])
    weights = token_weights(mask, mode, totals, max_tokens=LIMIT)
    loss, grad, _, _ = whole(log_probs, old, advantages, mask, weights)

    sum_of_losses, order = 0.0, rng.permutation(8)
    gathered = np.zeros_like(grad)
    for part in np.split(order, 4):
        arrays = [np.pad(array[part], ((0, 1), (0, 2)), constant_values=3.0) for array in (log_probs, old, advantages)]
        padded_mask = np.pad(mask[part], ((0, 1), (0, 2)))
        part_weights = token_weights(padded_mask, mode, totals, max_tokens=LIMIT)
        part_loss, part_grad, _, _ = pieces(*arrays, padded_mask, part_weights)
        sum_of_losses += part_loss
        gathered[part] = part_grad[:-1, :-2]
    assert sum_of_losses == pytest.approx(loss, abs=1e-6)
    np.testing.assert_allclose(gathered, grad, rtol=0, atol=1e-6)


def test_totals_sum_over_ranks():
    assert batch_totals([3, 0, 5]).tolist() == [8, 2, 3]
    assert batch_totals([]).tolist() == [0, 0, 0]
    assert batch_totals([3, 0, 5]).shape == (3,)
    np.testing.assert_array_equal(batch_totals([3, 0]) + batch_totals([5]), batch_totals([3, 0, 5]))


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_weighs_nothing(mode):
    weights = token_weights(np.zeros((2, 3), np.float32), mode, batch_totals([0, 0]), max_tokens=LIMIT)
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))


def test_mistakes_are_named():
    with pytest.raises(UserError, match=r"Unknown aggregation 'tokn-mean': did you mean 'token-mean'\?"):
        token_weights(np.ones((1, 1)), "tokn-mean", batch_totals([1]))
    with pytest.raises(ValueError, match="max_tokens"):
        token_weights(np.ones((1, 1)), "dr_grpo", batch_totals([1]))
