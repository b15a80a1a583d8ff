"""The decoder's forms against stored results of another implementation and against the float64 oracle."""

import numpy as np
import pytest
import reference_model
from slow_cases import few_of
from small_model import POSITIONS, Golden, SmallModel, log_softmax, small_config
from whole_sequences import batch_inputs, compiled_logits

from mindrlhf.backend.operators import COMPOSED
from mindrlhf.configs.model import Llama3Scaling
from mindrlhf.models.rotary import rotary_table

# Of the eight frequencies at theta 1e6 some stay, one is between, and some are stretched.
SCALING = Llama3Scaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=64)


@pytest.fixture(
    scope="module",
    params=[
        *few_of(
            [
                "qwen2_tiny_lora",
                "qwen3_moe_tiny",
            ],
            ["llama3_tiny", "qwen2_tiny", "qwen3_tiny", "qwen3_tiny_lora", "qwen3_moe_dense_first_tiny"],
        ),
    ],
)
def golden(request, shared) -> Golden:
    return Golden.load(shared / "golden" / request.param)


@pytest.fixture(scope="module")
def completion_logits():
    """Compiles a model's shared-prompt form: (prefixes, lengths, inputs, their lengths) -> float32[N*G, R, vocab]."""
    from mindspore import Tensor, nn

    class Completions(nn.Cell):
        def __init__(self, decoder):
            super().__init__(auto_prefix=False)
            self.decoder = decoder

        def construct(self, prefix_ids, prefix_lengths, input_ids, lengths):
            return self.decoder.logits(
                self.decoder.completions(batch_inputs(prefix_ids, prefix_lengths, input_ids, lengths))
            )

    def compiled(model):
        graph = Completions(model.build()[0])
        return lambda *inputs: (
            graph(*(Tensor(part.astype(np.int32)) for part in inputs)).asnumpy().reshape((*inputs[2].shape, -1))
        )

    return compiled


def right_padded(sequences, fill):
    """int[B, S]; padding is drawn by `fill(count)`."""
    ids = fill((len(sequences), max(len(sequence) for sequence in sequences)))
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    return ids


def test_the_oracle_gives_the_stored_logits(golden):
    for sequence, logits in zip(golden.sequences, golden.logits_of, strict=True):
        np.testing.assert_allclose(golden.logits(sequence), logits, rtol=0, atol=2e-5)


def test_plain_form_gives_the_stored_logits_whatever_the_padding(golden):
    run = compiled_logits(golden)
    rng = np.random.default_rng(1)
    clean = run(right_padded(golden.sequences, np.zeros))
    noisy = run(right_padded(golden.sequences, lambda shape: rng.integers(0, golden.config.vocab_size, shape)))
    for row, logits in enumerate(golden.logits_of):
        got = clean[row, : len(logits)]
        np.testing.assert_allclose(got, logits, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(noisy[row, : len(logits)], got)
        next_ids = golden.sequences[row][1:]
        log_probs = log_softmax(got)[np.arange(len(next_ids)), next_ids]
        np.testing.assert_allclose(log_probs, golden.log_probs_of[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", few_of(["qwen3_tiny_lora"], ["qwen2_tiny_lora"]))
def test_compositions_give_the_stored_logits_of_adapters(shared, name):
    golden = Golden.load(shared / "golden" / name)
    got = compiled_logits(golden, COMPOSED)(right_padded(golden.sequences, np.zeros))
    for row, logits in enumerate(golden.logits_of):
        np.testing.assert_allclose(got[row, : len(logits)], logits, rtol=0, atol=2e-5)


def test_shared_prompt_form_gives_the_stored_logits(golden, completion_logits):
    """Each sequence is cut after another prompt; the second sample of a group leaves the sequence at once."""
    run = completion_logits(golden)
    rng = np.random.default_rng(2)
    cuts, longest = (1, 4, 5), max(len(sequence) for sequence in golden.sequences)
    prefixes = rng.integers(0, golden.config.vocab_size, (3, 8))
    inputs = rng.integers(0, golden.config.vocab_size, (6, longest))
    lengths = np.ones(6, int)
    for n, (sequence, cut) in enumerate(zip(golden.sequences, cuts, strict=True)):
        prefixes[n, : cut - 1] = sequence[: cut - 1]
        lengths[2 * n] = len(sequence) - cut + 1
        inputs[2 * n, : lengths[2 * n]] = sequence[cut - 1 :]
        inputs[2 * n + 1, 0] = sequence[cut - 1]
    got = run(prefixes, np.array(cuts) - 1, inputs, lengths)
    for n, (logits, cut) in enumerate(zip(golden.logits_of, cuts, strict=True)):
        np.testing.assert_allclose(got[2 * n, : len(logits) - cut + 1], logits[cut - 1 :], rtol=0, atol=2e-5)
        np.testing.assert_allclose(got[2 * n + 1, 0], logits[cut - 1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_layers": 1, "tie_word_embeddings": True}, id="one-layer-tied", marks=pytest.mark.slow),
        pytest.param({"num_kv_heads": 4, "head_dim": 6}, id="no-grouping-narrow-heads"),
        pytest.param(
            {"num_kv_heads": 1, "family": "qwen3", "qk_norm": True, "attention_bias": False}, id="one-kv-head"
        ),
    ],
)
def test_other_shapes_agree_with_the_oracle(completion_logits, changes):
    model = SmallModel.random(3, **changes)
    run = completion_logits(model)
    rng = np.random.default_rng(4)
    prefixes, inputs = rng.integers(0, 64, (2, 4)), rng.integers(0, 64, (4, 5))
    lengths, own = np.array([0, 3]), np.array([5, 2, 0, 5])
    got = run(prefixes, lengths, inputs, own)
    for row in range(4):
        n = row // 2
        expected = model.logits(np.concatenate([prefixes[n, : lengths[n]], inputs[row]]))[lengths[n] :]
        np.testing.assert_allclose(got[row, : own[row]], expected[: own[row]], rtol=0, atol=2e-5)


@pytest.mark.parametrize("scaling", [None, SCALING])
def test_rotary_table_turns_as_the_oracle_does(scaling):
    config = small_config(rope_theta=1e6, head_dim=16, rope_scaling=scaling)
    cos, sin = rotary_table(config, POSITIONS)
    assert cos.dtype == sin.dtype == np.float32
    assert cos.shape == sin.shape == (POSITIONS, 16)
    x = np.random.default_rng(5).normal(size=(3, 16))
    swapped = np.concatenate([-x[:, 8:], x[:, :8]], axis=1)
    for position in (0, 1, 77, POSITIONS - 1):
        expected = reference_model.rotate(x, position, config)
        np.testing.assert_allclose(x * cos[position] + swapped * sin[position], expected, rtol=0, atol=1e-6)
