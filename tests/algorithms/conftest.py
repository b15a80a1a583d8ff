"""What the tests of this room share: a loss compiled as the train graph compiles it, and 1,000 awkward batches."""

from dataclasses import dataclass

import numpy as np
import pytest


@pytest.fixture(scope="session")
def compile_loss():
    """Turns a loss into a function that runs it in a graph under value_and_grad, one compilation for each shape.

    The function: (log_probs, old_log_probs, advantages, mask[, selected], weights), each float32[B, T], old_log_probs
    None for on-policy -> (loss, gradient for log_probs, per-token losses, metrics), as NumPy.
    """
    import mindspore as ms
    from mindspore import ops

    class WeightedSum(ms.nn.Cell):
        def __init__(self, losses, on_policy):
            super().__init__()
            self.losses = losses
            self.on_policy = on_policy

        def construct(self, log_probs, weights, old_log_probs, advantages, mask, *selected):
            if self.on_policy:
                old_log_probs = ops.stop_gradient(log_probs)
            per_token, metrics = self.losses(log_probs, old_log_probs, advantages, mask, *selected)
            return (per_token * weights).sum(), per_token, metrics

    def compiled(losses, on_policy):
        gradient = ops.value_and_grad(WeightedSum(losses, on_policy), 0, None, has_aux=True)

        @ms.jit
        def step(log_probs, weights, *others):
            return gradient(log_probs, weights, *others)

        return step

    def make(losses):
        steps = {on_policy: compiled(losses, on_policy) for on_policy in (False, True)}

        def run(log_probs, old_log_probs, *others_and_weights):
            *others, weights = others_and_weights
            old = log_probs if old_log_probs is None else old_log_probs
            tensors = [ms.Tensor(np.asarray(array, np.float32)) for array in (log_probs, weights, old, *others)]
            (loss, per_token, metrics), grad = steps[old_log_probs is None](*tensors)
            figures = {name: value.asnumpy() for name, value in metrics.items()}
            return float(loss.asnumpy()), grad.asnumpy(), per_token.asnumpy(), figures

        return run

    return make


BATCHES, ROWS, TOKENS = 1000, 8, 6
GROUPINGS = ([4, 4], [8], [1, 7], [1, 3, 4], [2, 2, 2, 2], [5, 1, 1, 1])


def _random_rewards(rng, sizes):
    """Groups of rewards: continuous, binary (often without spread) or equal; now and then an abstained sample."""
    groups = []
    for size in sizes:
        kind = rng.integers(3)
        rewards = (rng.normal(size=size), rng.integers(0, 2, size).astype(float), np.full(size, 0.1))[kind]
        groups.append(np.where(rng.random(size) < 0.05, np.nan, rewards))
    return groups


@dataclass(frozen=True, eq=False)
class Batches:
    """float32[1000, 8, 6], 0 outside the mask, where log-probs hold garbage.

    lengths: int[1000, 8]. rewards: per batch a list of groups float64[G].
    """

    mask: np.ndarray
    log_probs: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    rollout: np.ndarray
    values: np.ndarray
    token_rewards: np.ndarray
    lengths: np.ndarray
    rewards: list[list[np.ndarray]]


@pytest.fixture(scope="session")
def batches() -> Batches:
    """1,000 batches of 8 rows x 6 tokens, with empty rows, groups of one, groups without spread and huge log-ratios."""
    rng = np.random.default_rng(20)
    shape = BATCHES, ROWS, TOKENS
    lengths = rng.integers(0, TOKENS + 1, shape[:2])
    mask = (np.arange(TOKENS) < lengths[..., None]).astype(np.float32)

    def near(log_probs, scale):
        moved = log_probs + rng.normal(scale=scale, size=shape)
        huge = rng.random(shape) < 0.03
        return np.where(huge, log_probs + rng.choice([-60.0, -19.0, 15.0, 40.0], size=shape), moved)

    log_probs = -rng.exponential(size=shape)
    garbage = rng.choice([1e30, -1e30, 0.0, 5.0], size=shape)
    arrays = {
        "log_probs": log_probs,
        "old": near(log_probs, 0.3),
        "reference": near(log_probs, 0.5),
        "rollout": near(log_probs, 0.1),
    }
    arrays = {name: np.where(mask > 0, array, garbage).astype(np.float32) for name, array in arrays.items()}
    return Batches(
        mask=mask,
        lengths=lengths,
        values=(rng.normal(size=shape) * mask).astype(np.float32),
        token_rewards=(rng.normal(scale=0.1, size=shape) * mask).astype(np.float32),
        rewards=[_random_rewards(rng, GROUPINGS[rng.integers(len(GROUPINGS))]) for _ in range(BATCHES)],
        **arrays,
    )
