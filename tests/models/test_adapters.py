"""What a run with adapters says of itself."""

from dataclasses import replace

import pytest
from small_model import small_config

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.models.adapters import adapter_line

MODEL = small_config(adapter=Adapter(4, 8, target_modules=("o_proj",)))  # 2 x 4 x (32 + 32) numbers


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
