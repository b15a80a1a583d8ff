"""Keys of MindFormers model YAMLs without effect here (MindFormers 1.9.0 and before).

Such a known key is accepted and listed as unused; anything else in these groups is a mistake in writing.
"""

from types import MappingProxyType


def _names(*lines: str) -> frozenset[str]:
    return frozenset(name for line in lines for name in line.split())


# Keys whose other values would make another model or another run than the one this suite computes.
MODEL_FIXED = MappingProxyType(
    {
        "attn_proj_has_bias": (False, None),
        "add_bias_linear": (False, None),
        "hidden_act": ("silu", "swiglu", None),
        "position_embedding_type": ("rope", None),
        "normalization": ("RMSNorm", None),
        "use_sliding_window": (False, None),
        "pet_config": (None,),
    }
)

MODEL_UNUSED = _names(
    # LlamaConfig
    "batch_size ignore_token_id rotary_dtype residual_dtype embedding_init_type qkv_concat parallel_config use_past",
    "is_dynamic use_rope_slice use_flash_attention use_ring_attention use_attn_mask_compression",
    "use_eod_attn_mask_compression parallel_optimizer fine_grain_interleave pp_interleave_num",
    "checkpoint_name_or_path block_size num_blocks quant_config llm_backend fused_rms_norm input_sliced_sig",
    "rmsnorm_compute_2d chunk_prefill calculate_per_token_loss pipeline_stage return_hidden_states",
    "parallel_decoding_params disable_lazy_inline",
    # the base class of all MindFormers configurations
    "name_or_path pretrained_model_dir mindformers_version tokenizer_class architectures is_encoder_decoder",
    "is_sample_acceleration quantization_config quantization auto_map auto_register",
    # Qwen2Config and Qwen3Config
    "use_cache sliding_window max_window_layers layer_types attention_dropout rope_parameters gated_linear_unit",
    "use_contiguous_weight_layout_attention hidden_dropout untie_embeddings_and_output_weights",
    "fp32_residual_connection",
    # seen in published YAMLs, read by no version of LlamaConfig or no longer
    "emb_dropout_prob use_past_shard compute_in_2d rotary_pct rotary_emb_base kv_channels pretrain_seqlen",
    "use_paged_attention use_kvcache_op is_flexible_shape use_kbk_infer model_name boost_model_name quant",
    "router_dense_type",
    # of experts: several are refused before (`unsupported`)
    "moe_config num_experts",
)

MODEL_GROUP_UNUSED = _names("arch pretrained_model_dir")

PARALLEL_UNUSED = _names(
    "optimizer_shard seq_split_num context_parallel_algo ulysses_degree_in_cp mem_coeff recompute swap",
    "micro_batch_interleave_num",  # a hint to MindSpore's automatic parallel mode, at the top level too
)

RECOMPUTE_UNUSED = _names(
    "select_recompute parallel_optimizer_comm_recompute select_comm_recompute mp_comm_recompute",
    "recompute_slice_activation select_recompute_exclude select_comm_recompute_exclude",
)

CONTEXT_UNUSED = _names(
    "max_call_depth save_graphs save_graphs_path ascend_config memory_optimize_level mempool_block_size",
    "mempool_device_memory enable_graph_kernel graph_kernel_flags runtime_num_threads infer_boost deterministic",
    "affinity_cpu_list affinity_config dataset_broadcast_opt_level enable_compile_cache compile_cache_path",
    "pynative_synchronize precompile_only inter_op_parallel_num memory_offload train_precision_sync",
    "infer_precision_sync",
)
