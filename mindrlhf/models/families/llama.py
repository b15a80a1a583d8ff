"""Llama 3 and models of its architecture: no biases, no norms of heads.

Llama 2's checkpoints have the same architecture; their chat markup is the tokenizer's own.
"""

from mindrlhf.models.families.family import Chat, Family

FAMILY = Family(
    name="llama",
    title="Llama 3",
    hf_class="Llama",
    chat=Chat(
        name="llama",
        before="<|start_header_id|>",
        between="<|end_header_id|>\n\n",
        after="<|eot_id|>",
        opening="<|begin_of_text|>",
    ),
    end_tokens=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    end_of_text="<|end_of_text|>",
    hf_defaults={"max_position_embeddings": 2048},
    without=("attention_bias", "mlp_bias"),
    hf_settings={"attention_bias": False, "mlp_bias": False},
    as_llama=True,
    gguf="llama",
    gguf_heads={"self_attn.q_proj": "num_heads", "self_attn.k_proj": "num_kv_heads"},
)
