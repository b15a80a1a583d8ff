"""The one table of names for a model's numbers: ours, HF's and MindFormers'."""

# Field of ModelConfig -> keys of HF's config.json and of a YAML's model_config; descriptions of one model must agree.
_SHAPE = {
    "vocab_size": ("vocab_size", "vocab_size"),
    "hidden_size": ("hidden_size", "hidden_size"),
    "intermediate_size": ("intermediate_size", "intermediate_size"),
    "num_layers": ("num_hidden_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "num_heads"),
    "num_kv_heads": ("num_key_value_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "head_dim"),
    "attention_bias": ("attention_bias", "qkv_has_bias"),
    "qk_norm": (None, "qk_norm"),
    "rms_norm_eps": ("rms_norm_eps", "rms_norm_eps"),
    "rope_theta": ("rope_theta", "theta"),
    "rope_scaling": (None, "scaling_factor"),
    "tie_word_embeddings": ("tie_word_embeddings", "tie_word_embeddings"),
}
_OTHERS = {
    "max_position_embeddings": ("max_position_embeddings", "max_position_embedding"),
    "initializer_range": ("initializer_range", "initializer_range"),
    "eos_token_ids": ("eos_token_id", "eos_token_id"),
    "pad_token_id": ("pad_token_id", "pad_token_id"),
    "bos_token_id": ("bos_token_id", "bos_token_id"),
}

# Field of ModelConfig -> key of an HF config.json.
HF_KEYS = {field: hf for field, (hf, _) in (_SHAPE | _OTHERS).items() if hf}
# Key of a YAML's model_config -> field of ModelConfig: the numbers that two descriptions of one model must share.
SHAPE_FIELDS = {key: field for field, (_, key) in _SHAPE.items()}
# Other spelling of a key of model_config -> the key: HF's, and MindFormers' newer (Megatron-style) ones.
SPELLINGS = {hf: key for hf, key in (_SHAPE | _OTHERS).values() if hf not in (None, key)} | {
    "rope_scaling": "scaling_factor",
    "add_qkv_bias": "qkv_has_bias",
    "qk_layernorm": "qk_norm",
    "init_method_std": "initializer_range",
    "params_dtype": "param_init_type",
    "layernorm_compute_dtype": "layernorm_compute_type",
    "softmax_compute_dtype": "softmax_compute_type",
}
