"""Parts of a model that sees that train alone, with the stored gradients, and which weights have adapters."""

from dataclasses import replace

import numpy as np
import pytest
from small_updater import RATE, Subject

from mindrlhf.configs.lora import Adapter
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import parameter_table
from mindrlhf.models.vision.rows import TOWER, part_of
from mindrlhf.training.objective import NEGATIVE_LOG_LIKELIHOOD


def gradients_of(seeing):
    subject = Subject(seeing, NEGATIVE_LOG_LIKELIHOOD)
    update = subject.updater(seeing.groups, RATE, weights=seeing.weights)
    return subject.gradients, update


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [("vision",), ("vision", "merger"), ("text",)])
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
