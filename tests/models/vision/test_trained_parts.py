"""Parts of a model that sees that train alone, and adapters of its tower: gradients follow from the stored model's."""

from dataclasses import replace

import numpy as np
import pytest
from seeing_model import Seeing
from small_model import random_arrays
from small_updater import RATE, Subject, assert_close

from mindrlhf.configs.lora import Adapter
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.models.vision.rows import TOWER, is_tower, part_of
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD

ADAPTER = Adapter(3, 6, target_modules=("qkv", "merger.mlp.2", "down_proj", "v_proj"))


def gradients_of(seeing):
    subject = Subject(seeing, NEGATIVE_LOG_LIKELIHOOD)
    update = subject.updater(seeing.groups, RATE, weights=seeing.weights)
    return subject.gradients, update


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(("vision",), marks=pytest.mark.slow),
        ("vision", "merger"),
        pytest.param(("text",), marks=pytest.mark.slow),
    ],
)
def test_what_is_frozen_has_no_gradient_and_the_rest_has_its_own(seeing, frozen):
    config = seeing.config.model_copy(update={"frozen": frozen})
    part = replace(seeing, config=config)
    gradients, update = gradients_of(part)
    trained = {spec.name for spec in seeing.specs if part_of(spec) not in frozen}
    assert gradients.keys() == trained
    seeing.check_log_probs(update.outputs)
    for spec in seeing.specs:
        if spec.name in trained:
            norm = np.linalg.norm(gradients[spec.name].astype(np.float64))
            np.testing.assert_allclose(norm, seeing.facts["grad_norms"][spec.hf_name], rtol=1e-4, err_msg=spec.name)


def adapted_model(seeing) -> Seeing:
    """The model whose weights under adapters lack their product, so that both together are the stored ones."""
    config = seeing.config.model_copy(update={"adapter": ADAPTER})
    arrays = random_arrays(config, 3)
    table = {spec.name: spec for spec in parameter_table(config)}
    for name, spec in table.items():
        if not spec.adapts:
            arrays[name] = seeing.arrays[name]
    for name, spec in table.items():
        if spec.kind == "lora_b":
            weight = f"{name.removesuffix('.lora_b')}.weight"
            first = arrays[f"{name.removesuffix('b')}a"]
            arrays[weight] = arrays[weight] - np.float32(spec.scale) * (arrays[name] @ first)
    return replace(seeing, config=config, arrays=arrays)


def test_adapters_have_the_gradients_that_follow_from_their_weights(seeing):
    """With W + s B A: dA = s B^T dW and dB = s dW A^T."""
    model = adapted_model(seeing)
    gradients, update = gradients_of(model)
    seeing.check_log_probs(update.outputs)
    whole, _ = gradients_of(seeing)
    specs = [spec for spec in model.specs if spec.kind == "lora_b"]
    assert {spec.name.split(".")[-2] for spec in specs} == {"qkv", "2", "down_proj", "w2", "wv"}
    assert any(is_tower(spec) for spec in specs)
    assert gradients.keys() == {f"{spec.name.removesuffix('b')}{kind}" for spec in specs for kind in "ab"}
    for spec in specs:
        name = spec.name.removesuffix(".lora_b")
        first, second = (model.arrays[f"{name}.lora_{kind}"].astype(np.float64) for kind in "ab")
        slope = spec.scale * whole[f"{name}.weight"].astype(np.float64)
        assert_close(gradients[f"{name}.lora_a"], second.T @ slope, 1e-4, name)
        assert_close(gradients[f"{name}.lora_b"], slope @ first.T, 1e-4, name)


def test_adapters_of_a_convolution_are_refused(seeing):
    config = seeing.config.model_copy(update={"adapter": Adapter(2, 4.0, target_modules=("proj",))})
    with pytest.raises(UserError, match=r"name visual\.patch_embed\.proj, a convolution, .* lora\.exclude_modules"):
        parameter_table(config)
    without = replace(config.adapter, exclude_modules=("patch_embed.proj",))
    rows = parameter_table(config.model_copy(update={"adapter": without}))
    assert all(spec.name.startswith(f"{TOWER}blocks.") for spec in rows if spec.adapts)


def test_all_linear_is_the_text_alone(seeing):
    rows = parameter_table(seeing.config.model_copy(update={"adapter": Adapter(2, 4.0)}))
    assert {part_of(spec) for spec in rows if spec.adapts} == {"text"}
