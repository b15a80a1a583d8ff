"""The token choice of Clip-Cov and KL-Cov against a direct count."""

import numpy as np
import pytest

from mindrlhf.algorithms.covariance import select_clip_cov, select_kl_cov, token_covariances
from mindrlhf.algorithms.losses import policy_loss

BAND = {"low": 1.0, "high": 5.0}


@pytest.fixture(scope="module")
def rows():
    """(log_probs, advantages): 40 rows of 0 to 29 tokens, one advantage per row."""
    rng = np.random.default_rng(9)
    log_probs = [-rng.exponential(size=length).astype(np.float32) for length in rng.integers(0, 30, 40)]
    return log_probs, rng.normal(scale=2.0, size=40).astype(np.float32)


def direct(log_probs, advantages):
    flat = np.concatenate(log_probs).astype(np.float64)
    spread = np.concatenate([np.full(len(row), float(a)) for row, a in zip(log_probs, advantages, strict=True)])
    return np.array([(a - spread.mean()) * (p - flat.mean()) for a, p in zip(spread, flat, strict=True)])


def test_covariances(rows):
    np.testing.assert_allclose(token_covariances(*rows), direct(*rows), rtol=1e-12)
    per_token = [np.full(len(row), float(a)) for row, a in zip(*rows, strict=True)]
    np.testing.assert_allclose(token_covariances(rows[0], per_token), direct(*rows), rtol=1e-12)


def test_kl_cov_takes_the_highest(rows):
    chosen = np.concatenate(select_kl_cov(*rows, seed=0, ratio=0.05))
    covariances = direct(*rows)
    assert chosen.sum() == int(0.05 * covariances.size)
    assert covariances[chosen > 0].min() >= covariances[chosen == 0].max()


def test_clip_cov_draws_from_the_band(rows):
    covariances = direct(*rows)
    band = (covariances > 1.0) & (covariances < 5.0)
    assert 20 < band.sum() < band.size
    first, again, other = (np.concatenate(select_clip_cov(*rows, seed=seed, ratio=0.02, **BAND)) for seed in (1, 1, 2))
    assert first.sum() == int(0.02 * covariances.size)
    assert band[first > 0].all()
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    everything = np.concatenate(select_clip_cov(*rows, seed=1, ratio=1.0, **BAND))
    np.testing.assert_array_equal(everything > 0, band)


@pytest.mark.parametrize("select", [policy_loss(name).select for name in ("clip_cov", "kl_cov")])
def test_rows_keep_their_lengths_and_at_least_one_token_is_meant(select, rows):
    chosen = select(*rows, seed=3)
    assert [len(row) for row in chosen] == [len(row) for row in rows[0]]
    assert all(row.dtype == np.float32 for row in chosen)
    assert sum(row.sum() for row in chosen) == 1
    assert [row.size for row in select([np.zeros(0), np.zeros(0)], [0.0, 1.0], seed=3)] == [0, 0]


def test_registry_binds_options_of_loss_and_choice(rows):
    loss = policy_loss("kl_cov", {"kl_cov_ratio": 0.1, "ppo_kl_coef": 0.5})
    assert loss.select is not None
    chosen = np.concatenate(loss.select(*rows, 0))
    np.testing.assert_array_equal(chosen, np.concatenate(select_kl_cov(*rows, 0, ratio=0.1)))
