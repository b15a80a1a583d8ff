"""Token log-probs from hidden states: values and gradients against float64, in one chunk and in several."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from collecting_head import CollectingHead
from hypothesis import given
from hypothesis import strategies as st
from small_model import log_softmax

from mindrlhf.backend import read, write
from mindrlhf.backend.native.operators import open_operators
from mindrlhf.models.head import CHUNK_NUMBERS, TokenLogProbs, TokenValues, chunk_count
from mindrlhf.models.weight import collect_gradients

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 12, 6, 17, 0.7
# One of three chunks has none.
USED = np.array([1, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 0], bool)
# What is in the buffer of the head's gradient.
BEFORE = np.random.default_rng(2).normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
ENTROPY_WEIGHTS = np.random.default_rng(1).normal(size=TOKENS) * USED


ONE_CHUNK, THREE_CHUNKS, A_TOKEN_EACH = CHUNK_NUMBERS, 4 * VOCABULARY, 1
# (numbers of a chunk, whether the entropy has a gradient, whether the head is fused)
FEW = [
    (ONE_CHUNK, False, False),
    (THREE_CHUNKS, True, False),
    (ONE_CHUNK, True, True),
    (THREE_CHUNKS, False, True),
    (A_TOKEN_EACH, True, True),
]
REST = [(chunk, not bonus, fused) for chunk, bonus, fused in FEW]
REST += [(A_TOKEN_EACH, bonus, False) for bonus in (False, True)]


@pytest.fixture(scope="module", params=[*FEW, *(pytest.param(one, marks=pytest.mark.slow) for one in REST)], ids=str)
def run(request):
    """(hidden, head, targets, weights) -> log-probs and entropy of the tokens that are USED, and the gradients of the
    sum over these of weights * log-probs plus ENTROPY_WEIGHTS * entropy, which counts only where the entropy has a
    gradient.
    """
    import mindspore
    from mindspore import Tensor, nn, ops

    chunk_numbers, entropy_gradient, is_fused = request.param
    fused = open_operators() if is_fused else None
    if is_fused and fused is None:
        pytest.skip("the fused operators cannot be built here")
    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")

    class Weighted(nn.Cell):
        def __init__(self):
            super().__init__()
            log_probs = TokenLogProbs(TEMPERATURE, chunk_numbers, entropy_gradient=entropy_gradient, operators=fused)
            self.head = CollectingHead(VOCABULARY, WIDTH, log_probs)
            self.used = Tensor(USED.astype(np.int32))

        def construct(self, hidden, targets, weights, entropy_weights):
            out = self.head(hidden, targets, self.used)
            return (weights * out[0]).sum() + (entropy_weights * out[1]).sum(), out[0], out[1]

    weighted = Weighted()
    parameter, buffer = weighted.head.head, weighted.head.buffer
    gradient = ops.value_and_grad(weighted, 0, collect_gradients(weighted, [parameter], [buffer]), has_aux=True)

    @mindspore.jit
    def graph(*inputs):
        return gradient(*inputs)

    def compute(hidden, head, targets, weights):
        write(parameter, np.asarray(head, np.float32))
        write(buffer, BEFORE)
        floats = [Tensor(np.asarray(part, np.float32)) for part in (hidden, weights, ENTROPY_WEIGHTS)]
        (_, *found), (d_hidden, _) = graph(floats[0], Tensor(targets.astype(np.int32)), *floats[1:])
        return [part.asnumpy() for part in (*found, d_hidden)] + [read(buffer) - BEFORE]

    compute.entropy_gradient = entropy_gradient
    return compute


def inputs(scale=1.0):
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(TOKENS, WIDTH)) * scale, rng.normal(size=(VOCABULARY, WIDTH))
    return hidden, head, rng.integers(0, VOCABULARY, TOKENS), rng.normal(size=TOKENS) * USED


def expected_log_probs(hidden, head):
    return log_softmax(hidden @ head.T / TEMPERATURE)


def test_values(run):
    hidden, head, targets, weights = inputs()
    log_probs, entropy, *_ = run(hidden, head, targets, weights)
    expected = expected_log_probs(hidden, head)
    expected_entropy = -(np.exp(expected) * expected).sum(-1)
    np.testing.assert_allclose(log_probs[USED], expected[np.arange(TOKENS), targets][USED], rtol=0, atol=2e-6)
    np.testing.assert_allclose(entropy[USED], expected_entropy[USED], rtol=0, atol=5e-6)
    assert np.isfinite([log_probs, entropy]).all()


def test_gradients_are_the_slopes_of_the_float64_values(run):
    hidden, head, targets, weights = inputs()
    d_hidden, d_head = run(hidden, head, targets, weights)[2:]

    def loss():
        log_probs = expected_log_probs(hidden, head)
        entropy = -(np.exp(log_probs) * log_probs).sum(-1)
        bonus = (ENTROPY_WEIGHTS * entropy).sum() if run.entropy_gradient else 0.0
        return (weights * log_probs[np.arange(TOKENS), targets]).sum() + bonus

    for array, gradient in ((hidden, d_hidden), (head, d_head)):
        slopes = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            kept = array[index]
            array[index] = kept + 1e-5
            above = loss()
            array[index] = kept - 1e-5
            slopes[index] = (above - loss()) / 2e-5
            array[index] = kept
        np.testing.assert_allclose(gradient, slopes, rtol=0, atol=5e-6)


def test_huge_logits_stay_finite(run):
    hidden, head, targets, weights = inputs(scale=1e4)
    log_probs, entropy, d_hidden, d_head = run(hidden, head, targets, weights)
    expected = expected_log_probs(np.float32(hidden), np.float32(head))[np.arange(TOKENS), targets]
    np.testing.assert_allclose(log_probs[USED], expected[USED], rtol=1e-5, atol=0.05)
    for part in (entropy, d_hidden, d_head):
        assert np.isfinite(part).all()


def test_values_are_a_product_with_one_row():
    import mindspore
    from mindspore import Tensor

    mindspore.set_context(mode=mindspore.GRAPH_MODE, device_target="CPU")
    rng = np.random.default_rng(2)
    hidden, head = rng.normal(size=(TOKENS, WIDTH)), rng.normal(size=(1, WIDTH))
    values = TokenValues()(Tensor(np.float32(hidden)), Tensor(np.float32(head))).asnumpy()
    np.testing.assert_allclose(values, (hidden @ head.T)[:, 0], rtol=1e-5)


@given(st.integers(1, 4096), st.integers(1, 200_000), st.integers(1, 10**7))
def test_chunks_are_equal_within_the_limit_and_as_few_as_can_be(tokens, vocabulary, limit):
    count = chunk_count(tokens, vocabulary, limit)
    fitting = [n for n in range(1, tokens + 1) if tokens % n == 0 and tokens // n * vocabulary <= limit]
    # Where even one row is beyond the limit, a chunk is one row.
    assert count == (fitting[0] if fitting else tokens)


@pytest.mark.parametrize("size", ["0.5B", "7B"])
def test_the_default_limit_leaves_usual_batches_a_handful_of_chunks(size):
    vocabulary = {"0.5B": 151936, "7B": 152064}[size]
    assert chunk_count(2048, 2048) == 1
    assert chunk_count(8 * 32, vocabulary) == 1
    assert chunk_count(16384, vocabulary) == 64


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_logits_are_in_memory_a_chunk_at_a_time(fused):
    """Ten chunks more have 640 MiB of logits, and cost a process only their part of the graph (about 100 MiB)."""
    script = Path(__file__).resolve().parents[1] / "helpers" / "head_memory.py"
    command = [sys.executable, str(script), "fused" if fused else "composed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 400
