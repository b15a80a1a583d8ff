"""The float64 answers: slopes against finite differences, models against another oracle and against stored figures."""

import numpy as np
import pytest
import reference_model
from small_model import Golden

from mindrlhf.acceptance import float64, reference
from mindrlhf.acceptance.answers import answers, figures_of, stored_figures
from mindrlhf.acceptance.float64 import Node, gradients
from mindrlhf.acceptance.grpo64 import AdamSettings, ScoredGroup
from mindrlhf.acceptance.inputs import exact, groups_of, numbers, rows_of, tiny_models, tiny_rows, tiny_weights
from mindrlhf.acceptance.models import smallest_margin
from mindrlhf.acceptance.reference import Reference, Rows
from mindrlhf.checkpoint.hf_tensors import split
from mindrlhf.models.parameters import parameter_table

pytestmark = pytest.mark.fast

A, B = numbers("a", 3, 4).astype(np.float64), numbers("b", 4).astype(np.float64)
FORMULAS = {
    "sums": lambda a, b: a + b - a * b,
    "products": lambda a, b: a @ a.T * 0.3 + (b * b).sum(),
    "quotients": lambda a, b: a / (b * b + 1.0) + (a * a + 1.0) ** -0.5,
    "powers": lambda a, b: float64.exp(a * 0.3) * float64.log(b * b + 1.0),
    "rows": lambda a, b: a[np.array([0, 2, 0])] + b[1:2],
    "shapes": lambda a, b: (
        float64.concat([a.transpose((1, 0)), b.reshape(4, 1)], 1) - a.mean(-1).T.sum(1, keepdims=True)
    ),
    "softmax": lambda a, b: float64.softmax(a) * float64.log_softmax(a + b),
    "choices": lambda a, b: float64.minimum(a, b) + float64.clip(a, -0.5, 0.5),
    "norm": lambda a, b: reference.rms_norm(a, b, 1e-3),
    "swiglu": lambda a, b: reference.swiglu(a, b),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_slopes_are_those_of_finite_differences(name):
    formula = FORMULAS[name]
    a, b = Node(A), Node(B)
    out = formula(a, b)
    slopes = numbers(f"{name} slopes", *out.shape).astype(np.float64)
    for place, found in enumerate(gradients(out, slopes, [a, b])):
        arrays = [A, B]
        for index in np.ndindex(arrays[place].shape):
            sides = []
            for step in (1e-6, -1e-6):
                moved = [array.copy() for array in arrays]
                moved[place][index] += step
                sides.append((formula(Node(moved[0]), Node(moved[1])).value * slopes).sum())
            assert found[index] == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-6, abs=1e-7)


def test_an_unused_input_has_slope_zero_and_stopped_values_have_none():
    a, b = Node(A), Node(B)
    np.testing.assert_array_equal(gradients(a * 2.0, 1.0, [b])[0], np.zeros(4))
    np.testing.assert_array_equal(gradients(float64.stopped(a) * a, 1.0, [a])[0], A)


@pytest.mark.parametrize("family", tiny_models())
def test_the_model_is_another_oracles(family):
    """The tests' own oracle goes over whole sequences, position by position."""
    config = tiny_models()[family]
    weights = tiny_weights(config, family)
    stored = {}
    for spec in parameter_table(config):
        stored |= dict(split(spec, weights[spec.name]))
    model = Reference(config, weights)
    for group in groups_of(family, config.vocab_size):
        ids = np.concatenate([group.prompt_ids, group.responses[0]])
        found = model.logits(rows_of(group.prompt_ids, group.responses[0])).value
        expected = reference_model.logits(config, stored, ids[:-1])[len(group.prompt_ids) - 1 :]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", tiny_models())
def test_a_batch_is_its_sequences(family):
    """Completions of a padded batch have the logits that they have alone."""
    config = tiny_models()[family]
    model = Reference(config, tiny_weights(config, family))
    rows = tiny_rows(family, config.vocab_size)
    n, p, g, r = rows.split
    together = model.logits(rows).value.reshape(n * g, r, -1)
    for i in range(n * g):
        before, own = rows.lengths[0][i // g], rows.lengths[1][i]
        start = n * p + i * r
        ids = np.concatenate([rows.ids[i // g * p :][:before], rows.ids[start : start + own]])
        alone = Rows((1, before, 1, own), ((before,), (own,)), ids, np.arange(ids.size))
        np.testing.assert_allclose(together[i, :own], model.logits(alone).value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["qwen2_tiny", "qwen3_tiny", "llama3_tiny", "qwen3_moe_tiny"])
def test_logits_are_those_of_another_implementation(shared, name):
    golden = Golden.load(shared / "golden" / name)
    model = Reference(golden.config, golden.arrays)
    for ids, logits in zip(golden.sequences, golden.logits_of, strict=True):
        found = model.logits(rows_of(ids[:1], [*ids[1:], 0])).value
        np.testing.assert_allclose(found, logits, rtol=0, atol=2e-5)


def test_experts_are_chosen_far_from_the_others():
    """No error of bfloat16 changes a token's experts, which would change everything."""
    margins = {family: smallest_margin(config, family) for family, config in tiny_models().items()}
    assert all(margin > 0.1 for margin in margins.values()), margins
    assert any(np.isfinite(margin) for margin in margins.values())


def test_inputs_are_exact_in_bfloat16_and_the_same_everywhere():
    drawn = numbers("x", 2, 3)
    np.testing.assert_array_equal(exact(drawn), drawn)
    np.testing.assert_array_equal(numbers("x", 2, 3), drawn)


def test_adamw_is_the_formula():
    adam = AdamSettings(rate=0.1, beta1=0.5, beta2=0.75, eps=0.01, decay=0.2, max_norm=1.0)
    weights, moments = {"w": np.array([1.0, -2.0])}, {}
    adam.apply({"w": np.array([3.0, 4.0])}, moments, weights, {"w": True}, 1)
    clipped = np.array([3.0, 4.0]) / 5.000001
    np.testing.assert_allclose(weights["w"], np.array([1.0, -2.0]) * 0.98 - 0.1 * clipped / (clipped + 0.01))


def test_advantages_are_groups_normalised():
    found = ScoredGroup(np.zeros(1), [], np.array([1.0, 2.0, 3.0])).advantages
    np.testing.assert_allclose(found, [-1, 0, 1], atol=2e-6)


def test_stored_figures_are_those_of_the_answers():
    """The script has written them: python -m mindrlhf.acceptance.make_answers."""
    stored = stored_figures()
    found = {name: figures_of(name, answer) for name, answer in answers()}
    assert found.keys() == stored.keys()
    for name, figures in found.items():
        np.testing.assert_allclose(figures, stored[name], rtol=1e-9, atol=1e-9 * stored[name][0], err_msg=name)
