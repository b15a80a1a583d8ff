"""What a run with adapters or frozen parts says of itself."""

from dataclasses import replace

import pytest
from small_model import small_config

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.models.adapters import trained_lines
from mindrlhf.models.parameters import parameter_table

MODEL = small_config(adapter=Adapter(4, 8, target_modules=("o_proj",)))  # 2 x 4 x (32 + 32) numbers


def adapter_line(model, config):
    return trained_lines(model, config)["adapters"]


@pytest.mark.parametrize(("config", "usual"), [(GRPOSettings(), 1e-5), (SFTSettings(), 1e-4)])
def test_counts_and_the_learning_rate(config, usual):
    counts = "512 of 20,256 parameters train (2.53%)"
    slow = f"{counts}; LOW LEARNING RATE: optimizer.lr is {config.optimizer.lr:g}, and adapters want about 10 times"
    assert adapter_line(MODEL, config).startswith(slow)
    assert adapter_line(MODEL, config).endswith(f", {usual:g} for example")
    faster = config.optimizer.model_copy(update={"lr": usual})
    config = config.model_copy(update={"optimizer": faster})
    assert adapter_line(MODEL, config) == counts
    dropping = MODEL.model_copy(update={"adapter": replace(MODEL.adapter, dropout=0.05)})
    assert adapter_line(dropping, config).startswith(f"{counts}; updates drop 5.0% of their inputs, in composed layers")


def test_counts_of_frozen_parts():
    vision = VisionConfig(
        depth=1, hidden_size=8, intermediate_size=8, num_heads=1, full_attention_blocks=(0,), sections=(2, 1, 1)
    )
    model = small_config(family="qwen2_5_vl", vision=vision)
    assert trained_lines(model, SFTSettings()) == {}
    frozen = model.model_copy(update={"frozen": ("vision", "merger")})
    text = sum(spec.size for spec in parameter_table(small_config()))
    every = sum(spec.size for spec in parameter_table(model))
    line = f"vision and merger; {text:,} of {every:,} parameters train ({text / every:.2%})"
    assert trained_lines(frozen, SFTSettings()) == {"frozen": line}
