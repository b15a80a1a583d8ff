"""Products of bfloat16 numbers: where they are there, what they are made of, and layers with them."""

import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
from bfloat16_numbers import rounded
from decode_inputs import alone, cache_of, drawn_by, no_context, no_histories
from mindspore import Tensor
from slow_cases import few_of
from small_model import Golden
from small_updater import RATE, Subject, rows_like

from mindrlhf.backend import find_device, native
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.native.operators import NativeOperators, open_operators
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.errors import UserError
from mindrlhf.rollout import decode_graphs as graphs
from mindrlhf.rollout.sampling import Sampler
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

# By default one test has the first, another the second: each is compiled in float32 and twice with rounded products.
GOLDEN = ["qwen3_tiny"]
OTHER_GOLDEN = ["qwen2_tiny_lora"]
SLOW_GOLDEN = ["llama3_tiny", "qwen2_tiny", "qwen3_tiny_lora"]
SLOTS = 20


@pytest.fixture(scope="module")
def bfloat16():
    if not native.library().bfloat16:
        pytest.skip("this processor has no fast bfloat16 products")
    return CPU.operators("bfloat16")


@cache
def one_update(shared, name: str, used, recompute: bool) -> tuple[float, dict[str, np.ndarray]]:
    """The loss and gradients of a stored model's sequences."""
    golden = Golden.load(shared / "golden" / name)
    groups = [SequenceGroup(ids[:1], (ids[1:],)) for ids in golden.sequences]
    tokens = sum(len(ids) - 1 for ids in golden.sequences)
    subject = Subject(golden, NEGATIVE_LOG_LIKELIHOOD, operators=used, recompute=recompute)
    update = subject.updater(groups, RATE, weights=rows_like(groups, lambda n: np.full(n, 1 / tokens)))
    return update.loss, subject.gradients


@pytest.mark.parametrize(("rows", "outputs"), [(700, 50), (7, 90), (1, 33)])
def test_a_linear_map_is_the_sum_of_products_of_rounded_numbers(bfloat16, rows, outputs):
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, 77), (outputs, 77)))
    found = bfloat16.linear(Tensor(x), Tensor(weight)).asnumpy()
    np.testing.assert_allclose(found, rounded(x) @ rounded(weight).T, rtol=0, atol=1e-5)


def test_numbers_are_rounded_to_the_nearest_even_one(bfloat16):
    """Halfway cases, the largest numbers, and what is not finite."""
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F0000, 0x7F800000, 0xFF800000, 0x7F800001], np.uint32)
    one = Tensor(np.ones((1, 1), np.float32))
    found = bfloat16.linear(Tensor(bits.view(np.float32).reshape(-1, 1)), one).asnumpy()[:, 0]
    expected = np.array([0x3F800000, 0x3F820000, 0x3F810000, 0x7F7F0000, 0x7F800000, 0xFF800000], np.uint32)
    np.testing.assert_array_equal(found[:-1].view(np.uint32), expected)
    assert np.isnan(found[-1])


def errors(shared, name: str, used) -> tuple[float, dict[str, float]]:
    """Of the loss, and of each parameter's gradient relative to its size; float32's are 1e-4 (`test_gradients`)."""
    (loss, expected), (found_loss, found) = (one_update(shared, name, one, False) for one in (None, used))
    wide = {key: gradient.astype(np.float64) for key, gradient in expected.items()}
    size = {key: np.linalg.norm(found[key] - one) / np.linalg.norm(one) for key, one in wide.items()}
    return found_loss / loss - 1, size


@pytest.mark.parametrize("name", few_of(GOLDEN, OTHER_GOLDEN + SLOW_GOLDEN))
def test_loss_and_gradients_are_near_the_exact_ones(bfloat16, shared, name):
    loss, gradients = errors(shared, name, bfloat16)
    assert 0 < abs(loss) < 1e-3
    assert max(gradients.values()) < 0.02


@pytest.mark.parametrize("name", few_of(OTHER_GOLDEN, GOLDEN + SLOW_GOLDEN))
def test_the_way_back_adds_less_than_one_percent(bfloat16, shared, name):
    """With a float32 way there: what is more comes from the rounded weights and inputs of the layers' own products."""
    back, exact = NativeOperators(str(native.library().path), "bfloat16"), open_operators("float32")
    for half in ("attention", "feed_forward"):
        back.half(half, False).forward = exact.half(half, False).forward
    back.token_log_probs = exact.token_log_probs
    loss, gradients = errors(shared, name, back)
    assert abs(loss) < 1e-6
    assert 0.001 < max(gradients.values()) < 0.01


def test_gradients_are_the_same_bits_with_layers_computed_again(bfloat16, shared):
    (loss, expected), (again, found) = (one_update(shared, "qwen3_tiny", bfloat16, part) for part in (False, True))
    assert again == loss
    for key, gradient in expected.items():
        assert found[key].tobytes() == gradient.tobytes(), key


def first_ids(golden) -> np.ndarray:
    return np.random.default_rng(3).integers(0, golden.config.vocab_size, SLOTS).astype(np.int32)


def drawn(golden, used, going: int) -> list[np.ndarray]:
    """Tokens, behaviour and policy log-probs of the first `going` of SLOTS slots."""
    decoder, _ = golden.build(40, operators=used)
    config, tokens, ids = golden.config, graphs.FUSED_TOKENS, first_ids(golden)
    uniform = np.random.default_rng(4).random((SLOTS, tokens)).astype(np.float32)
    sampler = Sampler([SamplingSettings(max_new_tokens=64)], config.vocab_size, ())
    graph = graphs.Decode(decoder, cache_of(config, SLOTS, 40, used.packs_cache), sampler)
    assert graph.fused
    remaining = np.where(np.arange(SLOTS) < going, tokens, 0).astype(np.int32)
    rest = no_context(SLOTS), no_histories(SLOTS), uniform, *drawn_by(SamplingSettings(), SLOTS)
    inputs = (ids, 0 * ids, 0 * ids, remaining, 0 * ids, *alone(SLOTS), *rest)
    return [part.asnumpy()[:going] for part in graph(*(Tensor(part) for part in inputs))[:3]]


def test_log_probs_of_drawn_tokens_are_those_of_the_rounded_model(bfloat16, shared):
    """Drawn in any company, from distributions that training computes again."""
    golden = Golden.load(shared / "golden" / "qwen2_tiny_lora")
    found = [[part[:3] for part in drawn(golden, bfloat16, going)] for going in (SLOTS, 3)]
    for one, other in zip(*found, strict=True):
        assert one.tobytes() == other.tobytes()
    ids, (token, behaviour, policy) = first_ids(golden), found[0]
    np.testing.assert_array_equal(behaviour, policy)  # temperature 1
    groups = [SequenceGroup(ids[i : i + 1], (token[i],)) for i in range(3)]
    updates = [
        Subject(golden, NEGATIVE_LOG_LIKELIHOOD, operators=used).updater(
            groups, 0.0, weights=rows_like(groups, lambda n: np.full(n, 1.0))
        )
        for used in (bfloat16, None)
    ]
    trained, exact = (np.concatenate([row for (row,) in update.outputs]) for update in updates)
    near, far = np.abs(policy.ravel() - trained).mean(), np.abs(policy.ravel() - exact).mean()
    assert near < 0.5 * far  # the same rounding on both sides
    assert far < 0.1


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_packed_weights_with_adapters_draw_the_same_bits_in_any_company(fused, shared, weights):
    """An adapter's numbers are float32 with int8 weights, whose columns come in other multiples."""
    golden = Golden.load(shared / "golden" / "qwen2_tiny_lora")
    exact, used = CPU.operators(), CPU.operators("float32", weights)
    every = drawn(golden, used, SLOTS)
    for going in (1, 3, 9, 18):
        for one, other in zip(drawn(golden, used, going), every, strict=True):
            assert one.tobytes() == other[:going].tobytes()
    (token, behaviour, _), (expected, log_probs, _) = every, drawn(golden, exact, SLOTS)
    same = token[:, 0] == expected[:, 0]
    assert same.mean() > 0.6
    np.testing.assert_allclose(behaviour[same, 0], log_probs[same, 0], rtol=0, atol=0.15)


def test_the_dtype_is_chosen_by_the_processor(monkeypatch):
    assert find_device("Ascend").product_dtype("auto") == "bfloat16"
    assert CPU.product_dtype("float32") == "float32"
    for fast in (True, False):
        monkeypatch.setattr(native, "library", lambda fast=fast: native.Library(None, bfloat16=fast))
        assert CPU.product_dtype("auto") == ("bfloat16" if fast else "float32")
    with pytest.raises(UserError, match=r"no fast bfloat16 products here .*AVX512_BF16.*; set float32 or auto"):
        CPU.product_dtype("bfloat16")


FORBIDDEN = """
from mindrlhf.backend.cpu import CPU
from mindrlhf.errors import UserError
print(CPU.product_dtype("auto"), CPU.describe_operators(), sep=" | ")
try:
    CPU.product_dtype("bfloat16")
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize("most", ["AVX512_CORE_VNNI", "AVX512_CORE", "AVX2"])
def test_onednn_may_be_forbidden_to_multiply_them(most):
    if native.library().path is None:
        pytest.skip("the fused operators could not be built")
    command, environment = (sys.executable, "-c", FORBIDDEN), {**os.environ, "ONEDNN_MAX_CPU_ISA": most}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    chosen, refused = done.stdout.splitlines()
    assert chosen.startswith("float32 | fused attention")
    assert chosen.endswith("float32 products alone: this processor has neither AVX512_BF16 nor AMX")
    assert refused.endswith("; set float32 or auto")
