"""Adapters that PEFT's library makes, against its logits on the same base. Needs torch, transformers and peft."""

import numpy as np
import pytest
from small_model import SmallModel
from whole_sequences import compiled_logits

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.peft import read_adapter
from mindrlhf.checkpoint.weight_source import open_weights
from mindrlhf.models.parameters import parameter_table

FORMS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
    "patterns": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 8},
        "alpha_pattern": {"v_proj": 3, "layers.0.self_attn.q_proj": 5},
    },
    "rslora": {"r": 6, "lora_alpha": 4, "use_rslora": True, "target_modules": r".*\.layers\.1\..*(gate|up|o)_proj"},
}


@pytest.mark.parametrize("base", ["qwen2_tiny", "qwen3_tiny"])
@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_that_peft_made_gives_its_logits(shared, tmp_path, base, form):
    torch, transformers, peft = (pytest.importorskip(name) for name in ("torch", "transformers", "peft"))
    torch.manual_seed(0)
    config = read_hf_config(shared / "golden" / base)
    weights = open_weights(shared / "golden" / base, config)
    save_hf(tmp_path / "base", config, ((spec, weights.read(spec.name)) for spec in parameter_table(config)))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", torch_dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **FORMS[form]))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    ids = np.random.default_rng(0).integers(0, model.config.vocab_size, (2, 24))
    given = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.ones(ids.shape, dtype=torch.int64)}
    with torch.no_grad():
        theirs = model(**given).logits.numpy()
        with model.disable_adapter():
            plain = model(**given).logits.numpy()

    stored = read_adapter(tmp_path / "adapter")
    stored.check_fits(config, base)
    adapted = config.model_copy(update={"adapter": stored.adapter})
    arrays = {
        spec.name: stored.arrays[spec.hf_name] if spec.adapts else weights.read(spec.name)
        for spec in parameter_table(adapted)
    }

    ours = compiled_logits(SmallModel(adapted, arrays))(ids)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert np.abs(theirs - plain).max() > 1e-2
