"""Learning rates by hand."""

import numpy as np
import pytest

from mindrlhf.configs.grpo import OptimizerSettings
from mindrlhf.training.optimizer import learning_rate


def rates(total, **settings):
    return [learning_rate(OptimizerSettings(**settings), update, total) for update in range(total)]


def test_constant():
    assert rates(4, lr=0.5, min_lr=0.1) == [0.5] * 4


def test_warm_up_reaches_the_full_rate_at_its_last_update():
    np.testing.assert_allclose(rates(6, lr=0.4, warmup_steps=4), [0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        # cos(pi/4) = 0.70711
        ("cosine", [0.5, 1.0, 1.0, 0.1 + 0.45 * 1.707107, 0.55, 0.1 + 0.45 * 0.292893]),
    ],
)
def test_decay_after_warm_up(decay, expected):
    """Two updates of warm-up and four of decay from 1.0 towards 0.1, which the update after the last would have."""
    settings = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 2, "lr_decay": decay}
    np.testing.assert_allclose(rates(6, **settings), expected, rtol=1e-6)
    for late in (6, 7, 100):
        np.testing.assert_allclose(learning_rate(OptimizerSettings(**settings), late, 6), 0.1)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_warm_up_longer_than_the_run(decay):
    np.testing.assert_allclose(rates(3, lr=1.0, warmup_steps=10, lr_decay=decay), [0.1, 0.2, 0.3])
    np.testing.assert_allclose(rates(2, lr=1.0, warmup_steps=2, lr_decay=decay), [0.5, 1.0])
