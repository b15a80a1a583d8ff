"""Loss and gradients of an update: against stored ones, and slopes of an oracle in float64."""

import numpy as np
import pytest
from slow_cases import few_of
from small_model import EXPERTS, Golden, SmallModel, norms_by_stored_name
from small_updater import RATE, TEMPERATURE, Subject, assert_close, random_groups, rows_like

from mindrlhf.configs.lora import Adapter
from mindrlhf.models.head import CHUNK_NUMBERS
from mindrlhf.training.batch import SequenceGroup
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

# One with biases and a tied head; one with norms of heads, dense layers and experts. Adapters follow below.
NAMES = ["qwen2_tiny", "qwen3_moe_dense_first_tiny"]
MORE_NAMES = ["qwen3_tiny", "llama3_tiny", "qwen3_tiny_lora", "qwen2_tiny_lora", "qwen3_moe_tiny"]


@pytest.mark.parametrize("name", few_of(NAMES, MORE_NAMES))
def test_loss_log_probs_and_gradient_norms_are_the_stored_ones(shared, name):
    golden = Golden.load(shared / "golden" / name)
    subject = Subject(golden, NEGATIVE_LOG_LIKELIHOOD)
    groups = [SequenceGroup(ids[:1], (ids[1:],)) for ids in golden.sequences]
    tokens = sum(len(ids) - 1 for ids in golden.sequences)
    update = subject.updater(groups, RATE, weights=rows_like(groups, lambda n: np.full(n, 1 / tokens)))
    np.testing.assert_allclose(update.loss, golden.loss, rtol=1e-6)
    for (row,), expected in zip(update.outputs, golden.log_probs_of, strict=True):
        np.testing.assert_allclose(row, expected, rtol=0, atol=1e-5)
    norms = norms_by_stored_name(golden, subject.gradients)
    assert set(norms) == set(golden.grad_norms)
    for stored, norm in norms.items():
        np.testing.assert_allclose(norm, golden.grad_norms[stored], rtol=1e-4, err_msg=stored)
    total = np.sqrt(sum(norm**2 for norm in golden.grad_norms.values()))
    np.testing.assert_allclose(update.result.grad_norm, total, rtol=1e-5)


ONE = {"num_layers": 1, "decoder_sparse_step": 1}
ADAPTER = Adapter(4, 8, exclude_modules=("k_proj",), rank_pattern={"down_proj": 3}, alpha_pattern={"q_proj": 5})


FOUR_CHUNKS = 40 * 32
OTHERS = EXPERTS | ONE | {"norm_topk_prob": False, "num_experts_per_tok": 3}


@pytest.mark.parametrize(
    ("adapter", "chunk_numbers", "changes"),
    few_of(
        [(None, FOUR_CHUNKS, {}), (ADAPTER, CHUNK_NUMBERS, EXPERTS | ONE)],
        [
            (ADAPTER, CHUNK_NUMBERS, {}),
            (None, CHUNK_NUMBERS, {}),
            (ADAPTER, FOUR_CHUNKS, {}),
            (None, CHUNK_NUMBERS, OTHERS),
        ],
    ),
)
def test_gradients_of_one_layer_are_slopes_of_the_oracle(adapter, chunk_numbers, changes):
    """The oracle's loss in float64, moved a little along one random direction for each parameter."""
    model = SmallModel.random(4, **{"num_layers": 1, "vocab_size": 32, "adapter": adapter} | changes)
    groups = [SequenceGroup(g.prompt_ids % 32, tuple(r % 32 for r in g.responses)) for g in random_groups()]
    rng = np.random.default_rng(5)
    weights = rows_like(groups, rng.standard_normal)
    # A bucket of its own: MindSpore compiles graphs with equal inputs anew when one of them dies.
    subject = Subject(model, NEGATIVE_LOG_LIKELIHOOD, TEMPERATURE, bucket=8, chunk_numbers=chunk_numbers)
    update = subject.updater(groups, 0.0, weights=weights)

    def loss(changed):
        return -sum(
            (weight * model.log_probs(group.prompt_ids, response, TEMPERATURE, changed)).sum()
            for group, of_group in zip(groups, weights, strict=True)
            for response, weight in zip(group.responses, of_group, strict=True)
        )

    np.testing.assert_allclose(update.loss, loss({}), rtol=1e-5)
    assert set(subject.gradients) == {spec.name for spec in model.specs if spec.trains}
    for spec in (spec for spec in model.specs if spec.trains):
        direction, value = rng.standard_normal(spec.shape), model.arrays[spec.name].astype(np.float64)
        slope = (loss({spec.name: value + 1e-6 * direction}) - loss({spec.name: value - 1e-6 * direction})) / 2e-6
        gradient = subject.gradients[spec.name].astype(np.float64)
        error = 1e-5 * np.linalg.norm(gradient) * np.linalg.norm(direction)
        np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=0, atol=error, err_msg=spec.name)


@pytest.mark.parametrize("started", few_of([True], [False]))
def test_gradients_of_adapters_are_projections_of_the_weights_own(started):
    """d loss / d B = s dW A^T and d loss / d A = s B^T dW, with dW that of the merged weight; B is 0 at the start.

    Rank and alpha are the inputs' number, so that A takes nothing away.
    """
    adapter = Adapter(32, 32, target_modules=("q_proj", "o_proj", "up_proj"))
    model = SmallModel.random(6, num_layers=1, vocab_size=32, adapter=adapter)
    zeros = {spec.name: model.arrays[spec.name] * np.float32(started) for spec in model.specs if spec.kind == "lora_b"}
    model = SmallModel(model.config, model.arrays | zeros)
    merged, base = model.merged(model.arrays), [spec for spec in model.specs if not spec.adapts]
    whole = SmallModel(model.config.base, {spec.name: merged[spec.hf_name].astype(np.float32) for spec in base})
    groups = [SequenceGroup(g.prompt_ids % 32, tuple(r % 32 for r in g.responses)) for g in random_groups()]
    weights = rows_like(groups, np.random.default_rng(5).standard_normal)
    subjects = [Subject(one, NEGATIVE_LOG_LIKELIHOOD, bucket=16) for one in (model, whole)]
    for subject in subjects:
        subject.updater(groups, 0.0, weights=weights)
    found, own = (subject.gradients for subject in subjects)
    checked = 0
    for spec in model.specs:
        if spec.adapts:
            name = spec.name.rpartition(".")[0]
            a, b, slope = model.arrays[f"{name}.lora_a"], model.arrays[f"{name}.lora_b"], own[f"{name}.weight"]
            expected = spec.scale * (slope @ a.T if spec.kind == "lora_b" else b.T @ slope)
            assert_close(found[spec.name], expected, 1e-5 if expected.any() else 0, spec.name)
            checked += expected.any()
    assert checked == (6 if started else 3)


def test_updates_with_adapters_lower_the_loss_and_leave_everything_else():
    model = SmallModel.random(4, num_layers=1, vocab_size=32, adapter=ADAPTER)
    groups = [SequenceGroup(g.prompt_ids % 32, tuple(r % 32 for r in g.responses)) for g in random_groups()]
    weights = rows_like(groups, lambda n: np.full(n, 1 / sum(len(r) for g in groups for r in g.responses)))
    subject = Subject(model, NEGATIVE_LOG_LIKELIHOOD, bucket=16, moves=True)
    losses = [subject.updater(groups, 1e-2, weights=weights).loss for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]
    for spec in model.specs:
        same = subject.weights()[spec.name].tobytes() == model.arrays[spec.name].tobytes()
        assert same != spec.trains, spec.name
