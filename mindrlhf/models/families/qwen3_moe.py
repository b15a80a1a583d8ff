"""Qwen3-MoE: Qwen3 with experts in place of some feed-forward halves."""

from mindrlhf.models.expert_layers import halves, layer_rows
from mindrlhf.models.families.family import Family
from mindrlhf.models.families.qwen2 import CHATML

FAMILY = Family(
    name="qwen3_moe",
    title="Qwen3-MoE",
    hf_class="Qwen3Moe",
    chat=CHATML,
    end_tokens=("<|im_end|>",),
    end_of_text="<|endoftext|>",
    qk_norm=True,
    hf_defaults={"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    without=("attention_bias",),
    hf_settings={"attention_bias": False, "use_sliding_window": False},
    mindformers="Qwen3MoeConfig",
    gguf="qwen3moe",
    experts=True,
    halves=halves,
    layer_rows=layer_rows,
)
