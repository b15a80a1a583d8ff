"""The one table of names for a model's numbers: ours, HF's and MindFormers'."""

from types import MappingProxyType
from typing import NamedTuple


class Name(NamedTuple):
    """Names of one field of `ModelConfig`; None where a format has no such key.

    shape: two descriptions of one model must agree on its value.
    """

    field: str
    hf: str | None
    mindformers: str | None
    shape: bool = True


NAMES = (
    Name("vocab_size", "vocab_size", "vocab_size"),
    Name("hidden_size", "hidden_size", "hidden_size"),
    Name("intermediate_size", "intermediate_size", "intermediate_size"),
    Name("num_layers", "num_hidden_layers", "num_layers"),
    Name("num_heads", "num_attention_heads", "num_heads"),
    Name("num_kv_heads", "num_key_value_heads", "n_kv_heads"),
    Name("head_dim", "head_dim", "head_dim"),
    Name("attention_bias", "attention_bias", "qkv_has_bias"),
    Name("qk_norm", None, "qk_norm"),
    Name("rms_norm_eps", "rms_norm_eps", "rms_norm_eps"),
    Name("rope_theta", "rope_theta", "theta"),
    Name("rope_scaling", None, "scaling_factor"),
    Name("tie_word_embeddings", "tie_word_embeddings", "tie_word_embeddings"),
    Name("max_position_embeddings", "max_position_embeddings", "max_position_embedding", shape=False),
    Name("initializer_range", "initializer_range", "initializer_range", shape=False),
    Name("eos_token_ids", "eos_token_id", "eos_token_id", shape=False),
    Name("pad_token_id", "pad_token_id", "pad_token_id", shape=False),
    Name("bos_token_id", "bos_token_id", "bos_token_id", shape=False),
)

# Field of ModelConfig -> key of an HF config.json.
HF_KEYS = MappingProxyType({name.field: name.hf for name in NAMES if name.hf})
# Key of a YAML's model_config -> field of ModelConfig: the numbers that two descriptions of one model must share.
SHAPE_FIELDS = MappingProxyType({name.mindformers: name.field for name in NAMES if name.shape and name.mindformers})
# Other spelling of a key of model_config -> the key: HF's, and MindFormers' newer (Megatron-style) ones.
SPELLINGS = MappingProxyType(
    {
        **{name.hf: name.mindformers for name in NAMES if name.hf and name.hf != name.mindformers},
        "rope_scaling": "scaling_factor",
        "add_qkv_bias": "qkv_has_bias",
        "qk_layernorm": "qk_norm",
        "init_method_std": "initializer_range",
        "params_dtype": "param_init_type",
        "layernorm_compute_dtype": "layernorm_compute_type",
        "softmax_compute_dtype": "softmax_compute_type",
    }
)
