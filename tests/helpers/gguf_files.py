"""Small GGUF files, written with the package `gguf`, and their weights as it dequantises them.

Names and the order of rows are spelled here once more.
"""

from pathlib import Path

import gguf
import numpy as np
from reference_model import frequency
from small_model import random_arrays

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import EMBEDDING, parameter_table

FLOATS = ("F32", "F16", "BF16")
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # by the package itself
# K-quants are blocks of random bits here. -> bytes of a block, offsets of the two factors, size of a typical number
# with factors of 1.
BLOCKS = {
    "Q2_K": (84, (80, 82), 30),
    "Q3_K": (110, (108,), 35),
    "Q4_K": (144, (0, 2), 600),
    "Q5_K": (176, (0, 2), 1200),
    "Q6_K": (210, (208,), 1300),
}
TYPES = (*FLOATS, *QUANTISED, *BLOCKS)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
ROUTER = "mlp.gate.weight"
# Of a model of one layer: experts in it.
EXPERTS = {
    "family": "qwen3_moe",
    "attention_bias": False,
    "qk_norm": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}


def wide_config(**changes) -> ModelConfig:
    """One layer whose rows are a whole block of every type: 256 numbers."""
    sizes = {"vocab_size": 320, "hidden_size": 256, "intermediate_size": 256, "num_layers": 1}
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "rope_theta": 1e4, "rms_norm_eps": 1e-5}
    return ModelConfig(**sizes | heads | changes)


def other_name(name: str) -> str:
    """A tensor's name in the file, of its name in Hugging Face's checkpoints."""
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, inner = module.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def architecture(config: ModelConfig) -> str:
    """A family's name in the file."""
    return config.family.replace("_", "")


def row_order(config: ModelConfig, name: str) -> list[int] | None:
    """For Llama's queries and keys: which row of ours each row of the file is."""
    if config.family != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return None
    heads, half = (config.num_heads if "q_proj" in name else config.num_kv_heads), config.head_dim // 2
    return [head * 2 * half + side * half + pair for head in range(heads) for pair in range(half) for side in (0, 1)]


def blocks(kind: str, array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """uint8[rows, bytes] of a matrix: its numbers in the type's blocks, or for K-quants random ones as large."""
    if kind not in BLOCKS:
        return gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    size, factors, typical = BLOCKS[kind]
    made = rng.integers(0, 256, (*array.shape[:-1], array.shape[-1] // 256, size), dtype=np.uint8)
    for offset in factors:
        made[..., offset : offset + 2] = np.frombuffer(np.float16(array.std() / typical).tobytes(), np.uint8)
    return made.reshape(*array.shape[:-1], -1)


def write_gguf(path: Path, config: ModelConfig, kind: str, seed: int = 0, **metadata) -> dict[str, np.ndarray]:
    """Write a model with matrices of a type and norms of F32; returns its weights by our names, as dequantised.

    metadata: further values; None leaves out one that is written otherwise.
    """
    rng = np.random.default_rng(seed)
    arrays, found = random_arrays(config, seed), {}
    arrays[EMBEDDING] *= 0.1  # a tied head makes logits of some units
    writer = gguf.GGUFWriter(path, architecture(config))
    for key, value in describe(config, metadata).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        kinds.get(type(value), writer.add_array)(key, value)
    for spec in parameter_table(config):
        order = row_order(config, spec.hf_name)
        array = arrays[spec.name] if order is None else arrays[spec.name][order]
        used = gguf.GGMLQuantizationType["F32" if array.ndim == 1 or spec.hf_name.endswith(ROUTER) else kind]
        raw = blocks(used.name, array, rng)
        dequantised = gguf.quants.dequantize(raw, used).reshape(array.shape)
        found[spec.name] = dequantised.astype(np.float32)
        if order is not None:
            found[spec.name] = np.empty_like(dequantised)
            found[spec.name][order] = dequantised
        writer.add_tensor(other_name(spec.hf_name), raw, raw_dtype=used)
    if config.rope_scaling:
        writer.add_tensor("rope_freqs.weight", rotary_factors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def rotary_factors(config: ModelConfig) -> np.ndarray:
    """float32[head_dim / 2]: what the rotary frequencies are divided by, of Llama 3's scaling."""
    plain = config.model_copy(update={"rope_scaling": None})
    pairs = range(config.head_dim // 2)
    return np.float32([frequency(plain, pair) / frequency(config, pair) for pair in pairs])


def describe(config: ModelConfig, changes) -> dict:
    """Metadata of a model with a tokenizer of bytes, two merges and control tokens."""
    prefix = architecture(config)
    letters = sorted(byte_letters())
    tokens = [*letters, "he", "Ġhe", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    padding = [f"[PAD{place}]" for place in range(len(tokens), config.vocab_size)]
    known = {
        "general.name": "tiny",
        f"{prefix}.block_count": config.num_layers,
        f"{prefix}.context_length": config.max_position_embeddings,
        f"{prefix}.embedding_length": config.hidden_size,
        f"{prefix}.feed_forward_length": config.intermediate_size,
        f"{prefix}.attention.head_count": config.num_heads,
        f"{prefix}.attention.head_count_kv": config.num_kv_heads,
        f"{prefix}.attention.key_length": config.head_dim,
        f"{prefix}.attention.value_length": config.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{prefix}.rope.freq_base": config.rope_theta,
        **experts(config, prefix),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *padding],
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3 + [5] * len(padding),
        "tokenizer.ggml.merges": ["h e", "Ġ he"],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.ggml.padding_token_id": len(tokens) - 3,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
    }
    return {key: value for key, value in (known | changes).items() if value is not None}


def experts(config: ModelConfig, prefix: str) -> dict:
    """Metadata of experts."""
    counts = {"count": config.num_experts, "used_count": config.num_experts_per_tok}
    counts["feed_forward_length"] = config.moe_intermediate_size
    return {f"{prefix}.expert_{name}": count for name, count in counts.items()} if config.num_experts else {}


def byte_letters() -> set[str]:
    """The letters that stand for bytes in byte-level BPE."""
    from tokenizers import pre_tokenizers

    return set(pre_tokenizers.ByteLevel.alphabet())
