"""Names of weights and numbers in GGUF files, for reading and writing."""

from collections.abc import Mapping

import numpy as np

from mindrlhf.configs.lora import LAYERS
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.models.families import FAMILIES, Family
from mindrlhf.models.parameters import EMBEDDING, HEAD, ParameterSpec, parameter_table

# Module in Hugging Face's checkpoints -> in GGUF files; a layer's below its number.
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
EMBEDDING_WEIGHT, HEAD_WEIGHT = "token_embd.weight", "output.weight"
ROTARY_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies: Llama 3's scaling as numbers

# Architecture in GGUF files -> family.
ARCHITECTURES = {family.gguf: name for name, family in FAMILIES.items() if family.gguf}
# Field of ModelConfig -> key below the architecture's name; then those of models with experts alone.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# Keys with the width of a head, which is one number here.
WIDTHS = ("attention.value_length", "rope.dimension_count")


def gguf_name(name: str) -> str | None:
    """Translate a tensor's name in Hugging Face's checkpoints to GGUF's, or None.

    Matrices of adapters keep their ending: `.lora_A.weight` is `.weight.lora_a`.
    """
    module, _, matrix = name.partition(".lora_")
    ending = f"weight.lora_{matrix[0].lower()}" if matrix else module.rpartition(".")[2]
    module = module if matrix else module.rpartition(".")[0]
    if module in OUTER:
        return f"{OUTER[module]}.{ending}"
    layer, _, inner = module.removeprefix(LAYERS).partition(".")
    return f"blk.{layer}.{LAYER[inner]}.{ending}" if module.startswith(LAYERS) and inner in LAYER else None


def architecture_of(config: ModelConfig, where: str) -> str:
    """Name a model's architecture in GGUF files.

    UserError for a model without one, and for experts that llama.cpp computes in another way.
    """
    name = FAMILIES[config.family].gguf
    if name is None:
        raise UserError(f"{where}: is a {config.family} model, and GGUF files have {', '.join(ARCHITECTURES)} here.")
    if config.num_experts and len(config.expert_layers) < config.num_layers:
        found = f"{where}: {len(config.expert_layers)} of {config.num_layers} layers have experts"
        raise UserError(f"{found}, and GGUF's {name} has them in all layers; use Hugging Face's format.")
    if config.num_experts and not config.norm_topk_prob:
        found = f"{where}: norm_topk_prob is false, and GGUF's {name} divides a token's weights of experts by their sum"
        raise UserError(f"{found}; use Hugging Face's format.")
    return name


def keys_of(family: Family) -> dict[str, str]:
    """Map fields of ModelConfig to the keys that a family's files have."""
    keys = KEYS | (EXPERT_KEYS if family.experts else {})
    return {field: f"{family.gguf}.{key}" for field, key in keys.items()}


def named_rows(config: ModelConfig, where: str) -> Mapping[str, ParameterSpec]:
    """Map GGUF's name of each weight to its row of the table.

    UserError for a model whose weights have no such names.
    """
    rows: dict[str, ParameterSpec] = {}
    for spec in parameter_table(config):
        name = gguf_name(spec.hf_name)
        if name is None:
            raise UserError(f"{where}: {spec.hf_name} has no name in a GGUF file; use Hugging Face's format.")
        rows[name] = spec
    return rows


def heads_of(spec: ParameterSpec, config: ModelConfig) -> int | None:
    """Find the number of heads of a weight whose rows are reordered, or None.

    Of an adapter the rows of matrix B are reordered, which are the outputs.
    """
    if spec.kind == "lora_a" or spec.layer is None:
        return None
    module = spec.hf_tensors[0].module.removeprefix(f"{LAYERS}{spec.layer}.")
    field = FAMILIES[config.family].gguf_heads.get(module)
    return field and getattr(config, field)


def alternated(array: np.ndarray, heads: int) -> np.ndarray:
    """Let the rows of each head's two halves alternate, as in GGUF files."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def halved(array: np.ndarray, heads: int) -> np.ndarray:
    """Undo `alternated`."""
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def is_float32(spec: ParameterSpec) -> bool:
    """Test for a vector or a router, which files have as float32."""
    return len(spec.shape) < 2 or spec.kind in ("router", "fixed")


def is_table(spec: ParameterSpec) -> bool:
    """Test for the embedding or the head, which keep more bits than layers."""
    return spec.name in (EMBEDDING, HEAD)
