"""Qwen3 (dense): norms of query and key heads, no biases.

The heads are normalised before the rotary embedding.
"""

from mindrlhf.models.families.family import Family
from mindrlhf.models.families.qwen2 import CHATML

FAMILY = Family(
    name="qwen3",
    title="Qwen3",
    hf_class="Qwen3",
    chat=CHATML,
    end_tokens=("<|im_end|>",),
    end_of_text="<|endoftext|>",
    qk_norm=True,
    hf_defaults={"head_dim": 128},
    without=("attention_bias",),
    hf_settings={"attention_bias": False, "use_sliding_window": False},
    mindformers="Qwen3Config",
    gguf="qwen3",
)
