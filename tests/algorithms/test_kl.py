"""KL estimators against float64 NumPy, finite differences, and an exact KL; a steered coefficient."""

import numpy as np
import pytest

from mindrlhf.algorithms.kl import ESTIMATORS, kl_estimator, steered_coefficient
from mindrlhf.errors import UserError

NAMES = [*ESTIMATORS, *(f"{name}+" for name in ESTIMATORS)]
STEP = 1e-5

FORMULAS = {
    "k1": lambda r: r,
    "abs": np.abs,
    "k2": lambda r: r**2 / 2,
    "k3": lambda r: np.exp(-r) - 1 + r,
    "low_var_kl": lambda r: np.clip(np.exp(-r) - 1 + r, -10, 10),
}


@pytest.fixture(scope="module")
def compiled():
    """name -> function of (log_probs, reference_log_probs, mask) giving values and the gradient of their sum."""
    import mindspore as ms
    from mindspore import ops

    cache = {}

    def get(name):
        if name not in cache:
            estimate = kl_estimator(name)

            def forward(log_probs, reference_log_probs, mask):
                values = estimate(log_probs, reference_log_probs, mask)
                return values.sum(), values

            gradient = ops.value_and_grad(forward, 0, None, has_aux=True)

            @ms.jit
            def step(log_probs, reference_log_probs, mask):
                return gradient(log_probs, reference_log_probs, mask)

            cache[name] = step

        def run(*arrays):
            (_, values), grad = cache[name](*(ms.Tensor(np.asarray(array, np.float32)) for array in arrays))
            return values.asnumpy(), grad.asnumpy()

        return run

    return get


@pytest.mark.parametrize("name", NAMES)
def test_value_and_gradient_on_1000_batches(name, compiled, batches):
    arrays = [array.reshape(-1, array.shape[-1]) for array in (batches.log_probs, batches.reference, batches.mask)]
    values, grad = compiled(name)(*arrays)
    log_probs, reference, mask = (array.astype(np.float64) for array in arrays)

    def masked(formula, shift):
        return np.where(mask > 0, formula(np.clip(log_probs + shift - reference, -20, 20)), formula(np.zeros(1)))

    formula = FORMULAS[name.removesuffix("+")]
    np.testing.assert_allclose(values, masked(formula, 0.0), rtol=1e-5, atol=2e-6)
    if name.endswith("+"):
        formula = FORMULAS["k2"]
    above, here, below = (masked(formula, shift) for shift in (STEP, 0.0, -STEP))
    expected = (above - below) / (2 * STEP)
    noise = 1e-15 * np.abs(here) / STEP
    smooth = np.abs(above - 2 * here + below) / STEP <= 1e-3 * np.abs(expected) + 2e-5 + 10 * noise
    assert smooth.mean() > 0.98
    np.testing.assert_array_less(np.abs(grad - expected)[smooth], (2e-6 + 1e-5 * np.abs(expected) + 10 * noise)[smooth])
    assert not values[mask == 0].any()
    assert not grad[mask == 0].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_padding_reaches_nothing(name, garbage, compiled):
    mask = np.array([[1, 1, 0], [0, 0, 0]], np.float32)
    log_probs, reference = np.where(mask > 0, -1.0, garbage), np.where(mask > 0, -1.5, -garbage)
    values, grad = compiled(name)(log_probs, reference, mask)
    assert np.isfinite(values).all()
    assert np.isfinite(grad).all()
    assert not values[mask == 0].any()
    assert not grad[mask == 0].any()


@pytest.mark.parametrize(("name", "unbiased"), [("k1", True), ("k3", True), ("k2", False), ("abs", False)])
def test_expectation_is_the_exact_kl(name, unbiased, compiled):
    """Summed over a vocabulary with the policy's probabilities, k1 and k3 are the KL divergence."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(2, 16))
    policy, reference = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    exact = (np.exp(policy) * (policy - reference)).sum()
    values, _ = compiled(name)(policy[None], reference[None], np.ones((1, 16)))
    assert (abs((np.exp(policy) * values).sum() - exact) < 1e-5) == unbiased


def test_k2_gradient_is_the_gradient_of_the_kl(compiled):
    """E[d k2 / d theta] over the policy equals d KL / d theta, and `k3+` has that gradient; k3 has another one."""
    rng = np.random.default_rng(6)
    logits, reference_logits = rng.normal(size=(2, 16))

    def log_softmax(x):
        return x - np.log(np.exp(x).sum())

    def exact_kl(x):
        return (np.exp(log_softmax(x)) * (log_softmax(x) - log_softmax(reference_logits))).sum()

    step = 1e-6 * np.eye(16)
    expected = np.array([(exact_kl(logits + d) - exact_kl(logits - d)) / 2e-6 for d in step])
    policy, reference = log_softmax(logits), log_softmax(reference_logits)

    def through_softmax(name):
        grad = compiled(name)(policy[None], reference[None], np.ones((1, 16)))[1][0] * np.exp(policy)
        return grad - np.exp(policy) * grad.sum()

    np.testing.assert_allclose(through_softmax("k2"), expected, atol=1e-6)
    np.testing.assert_allclose(through_softmax("k3+"), expected, atol=1e-6)
    assert np.abs(through_softmax("k3") - expected).max() > 1e-3


def test_unknown_estimator_is_named():
    with pytest.raises(UserError, match=r"Unknown KL estimator 'k33': did you mean 'k3'\?"):
        kl_estimator("k33")


def test_steered_coefficient_follows_the_clipped_error():
    steer = {"target": 6.0, "horizon": 1000}
    assert steered_coefficient(0.1, 6.6, 100, **steer) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert steered_coefficient(0.1, 600.0, 100, **steer) == pytest.approx(0.1 * 1.02)
    assert steered_coefficient(0.1, 0.0, 500, **steer) == pytest.approx(0.1 * 0.9)
