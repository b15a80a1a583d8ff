"""The critic's loss against float64 NumPy on 1,000 random batches; its gradient against finite differences."""

import numpy as np
import pytest

from mindrlhf.algorithms.value_loss import clipped_value_loss

STEP = 1e-5


@pytest.fixture(scope="module")
def compiled():
    """value_clip -> function of (values, old, returns, mask) giving losses, metrics, and the gradient of their sum."""
    import mindspore as ms
    from mindspore import ops

    def make(value_clip):
        def forward(values, old, returns, mask):
            losses, metrics = clipped_value_loss(values, old, returns, mask, value_clip=value_clip)
            return losses.sum(), losses, metrics

        gradient = ops.value_and_grad(forward, 0, None, has_aux=True)

        @ms.jit
        def step(values, old, returns, mask):
            return gradient(values, old, returns, mask)

        def run(*arrays):
            (_, losses, metrics), slope = step(*(ms.Tensor(np.asarray(array, np.float32)) for array in arrays))
            return losses.asnumpy(), {name: part.asnumpy() for name, part in metrics.items()}, slope.asnumpy()

        return run

    return {value_clip: make(value_clip) for value_clip in (None, 0.3)}


def definition(values, old, returns, value_clip):
    plain = (values - returns) ** 2
    if value_clip is None:
        return plain / 2
    return np.maximum(plain, (old + np.clip(values - old, -value_clip, value_clip) - returns) ** 2) / 2


@pytest.mark.parametrize("value_clip", [None, 0.3])
def test_value_and_gradient_on_1000_batches(value_clip, compiled, batches):
    """The policy's log-probs of the batches stand in for numbers that are near one another, with garbage on padding."""
    arrays = [a.reshape(-1, a.shape[-1]) for a in (batches.log_probs, batches.old, batches.reference, batches.mask)]
    losses, metrics, slope = compiled[value_clip](*arrays)
    values, old, returns, mask = (array.astype(np.float64) for array in arrays)

    def masked(shift):
        return np.where(mask > 0, definition(values + shift, old, returns, value_clip), 0.0)

    np.testing.assert_allclose(losses, masked(0.0), rtol=1e-5, atol=1e-6)
    above, here, below = masked(STEP), masked(0.0), masked(-STEP)
    expected = (above - below) / (2 * STEP)
    smooth = np.abs(above - 2 * here + below) / STEP <= 1e-3 * np.abs(expected) + 5e-5 + 1e-9 * np.abs(here)
    assert smooth.mean() > 0.98
    tolerance = 1e-5 + 1e-5 * np.abs(expected) + 1e-10 * np.abs(here) / STEP
    np.testing.assert_array_less(np.abs(slope - expected)[smooth], tolerance[smooth])
    for array in (losses, slope, *metrics.values()):
        assert np.isfinite(array).all()
        assert not array[mask == 0].any()
    assert ("value_clip_fraction" in metrics) == (value_clip is not None)
    if value_clip is not None:
        held = metrics["value_clip_fraction"][mask > 0].mean()
        assert 0.02 < held < 0.98
