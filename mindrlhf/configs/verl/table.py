"""verl's keys as data: its defaults, and all keys without a setting here.

Keys are those of verl's PPO trainers and of its DAPO recipe, without `actor_rollout_ref.`; a `*` stands for anything. A
key that a rule reads is translated; the other ones are looked up here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

POLICY = "actor_rollout_ref."

# Of the keys whose default is filled in where a command leaves them out.
VERL_DEFAULTS: Mapping[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.shuffle": True,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "actor.ppo_mini_batch_size": 256,
    "actor.ppo_epochs": 1,
    "actor.ppo_max_token_len_per_gpu": 16384,
    "actor.clip_ratio": 0.2,
    "actor.clip_ratio_c": 3.0,
    "actor.policy_loss.loss_mode": "vanilla",
    "actor.policy_loss.clip_cov_ratio": 2e-4,
    "actor.policy_loss.clip_cov_lb": 1.0,
    "actor.policy_loss.clip_cov_ub": 5.0,
    "actor.policy_loss.kl_cov_ratio": 2e-4,
    "actor.policy_loss.ppo_kl_coef": 0.1,
    "actor.loss_agg_mode": "token-mean",
    "actor.entropy_coeff": 0.0,
    "actor.use_kl_loss": False,
    "actor.kl_loss_coef": 0.001,
    "actor.kl_loss_type": "low_var_kl",
    "actor.grad_clip": 1.0,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.optim.betas": [0.9, 0.999],
    "rollout.n": 1,
    "rollout.temperature": 1.0,
    "rollout.top_k": -1,
    "rollout.top_p": 1.0,
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 1.0,
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.target_kl": 0.1,
    "algorithm.kl_ctrl.horizon": 10000,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
    "critic.cliprange_value": 0.5,
    "critic.grad_clip": 1.0,
    "trainer.critic_warmup": 0,
    "trainer.total_epochs": 30,
    "trainer.resume_mode": "auto",
    "trainer.save_freq": -1,
    "trainer.max_actor_ckpt_to_keep": None,
}

# Of further keys: a file that gives these values asks for nothing.
FILE_DEFAULTS: Mapping[str, Any] = {
    "rollout.val_kwargs.n": 1,
    "rollout.val_kwargs.do_sample": False,
    "rollout.val_kwargs.temperature": 0.0,
    "rollout.val_kwargs.top_k": -1,
    "rollout.val_kwargs.top_p": 1.0,
    "actor.optim.clip_grad": 1.0,
    "actor.optim.min_lr_ratio": 0.0,
    "actor.tau_neg": 1.05,
    "actor.tau_pos": 1.0,
    "actor.use_dynamic_bsz": False,
    "critic.optim.clip_grad": 1.0,
    "critic.optim.min_lr_ratio": 0.0,
    "data.audio_key": "audios",
    "data.image_key": "images",
    "data.prompt_key": "prompt",
    "data.return_raw_chat": True,
    "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
    "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
    "data.val_max_samples": -1,
    "data.video_key": "videos",
    "model.enable_gradient_checkpointing": True,
    "model.path": "~/models/deepseek-llm-7b-chat",
    "reward.num_workers": 8,
    "rollout.do_sample": True,
    "rollout.max_num_seqs": 256,
    "rollout.tensor_model_parallel_size": 2,
    "trainer.experiment_name": "gsm8k",
    "trainer.project_name": "verl_examples",
    "trainer.test_freq": -1,
    "trainer.val_before_train": True,
    "trainer.val_only": False,
}

# Keys with a rule whose value does nothing in verl either, with the other values of the command.
OF_OTHER_VALUES = (
    "data.gen_batch_size data.seed data.val_files data.train_files data.tokenizer *.tokenizer_path *.model.path "
    "actor.ppo_micro_batch_size actor.ppo_micro_batch_size_per_gpu actor.clip_ratio_low actor.clip_ratio_high "
    "actor.tau_pos actor.tau_neg actor.policy_loss.* actor.loss_scale_factor actor.use_token_level_loss "
    "*.optim.clip_grad *.optim.grad_clip *.optim.lr_warmup_steps *.optim.lr_warmup_steps_ratio "
    "*.optim.min_lr* *.optim.warmup_style *.optim.lr_scheduler_type *.optim.lr_decay_style "
    "actor.tis_imp_ratio_cap actor.checkpoint.async_save rollout.response_length rollout.repetition_penalty "
    "rollout.val_kwargs.* algorithm.kl_ctrl.* algorithm.filter_groups.* algorithm.rollout_correction.* "
    "*custom_reward_function.* *overlong_buffer* reward_model.num_workers trainer.resume_from_path "
    "trainer.total_training_steps trainer.rollout_data_dir trainer.default_local_dir trainer.logger"
)

# Reason -> keys, separated by spaces.
NEEDLESS: Mapping[str, str] = {
    "it does nothing in verl either, with the other values": OF_OTHER_VALUES,
    "one engine trains here, in one precision": (
        "*model_engine *@* defaults hydra.* *._target_ actor.strategy ref.strategy *.fsdp_config.* actor.engine.* "
        "ref.engine.* *.megatron.* *.veomni.* *.torchtitan.* *.automodel.* *.use_torch_compile *.entropy_checkpointing "
        "*.entropy_from_logits_* *.override_optimizer_config *.override_optimizer_config.* *.optim.optimizer "
        "*.optim.optimizer_impl *.optim.zero_indexed_step *.optim.use_* *.optim.*_dtype *.optim.muon_* "
        "*.optim.lr_wsd_* *.optim.weight_decay_incr_style *.optim.total_training_steps *.optim.override_* "
        "*.pad_to_length *.use_remove_padding "
        "*.use_fused_kernels *.fused_kernel_options.* *.use_liger *.tiled_mlp.* "
        "*.enable_activation_offload *.use_shm critic.strategy critic.enable "
        "trainer.use_legacy_worker_impl trainer.use_v1 "
        "*.rollout_n *.load_weight *.checkpoint.strict actor.calculate_* critic.fsdp.*"
    ),
    "one engine generates here, with the weights that are trained": (
        "rollout.name rollout.mode rollout.gpu_memory_utilization rollout.enforce_eager rollout.free_cache_engine "
        "rollout.cudagraph_capture_sizes rollout.dtype rollout.load_format rollout.layered_summon "
        "rollout.max_num_batched_tokens rollout.max_model_len rollout.enable_chunked_prefill "
        "rollout.enable_prefix_caching rollout.disable_log_stats rollout.engine_kwargs.* rollout.multi_stage_wake_up "
        "rollout.skip_tokenizer_init rollout.checkpoint_engine.* rollout.update_weights_bucket_megabytes "
        "rollout.scheduling_policy rollout.logprobs_mode rollout.prometheus.* rollout.disaggregation.* "
        "rollout.moe_load_balance_metrics_interval rollout.preserve_vllm_config rollout.use_fire_sampling rollout.mtp "
        "rollout.qat rollout.micro_batch_size rollout.engine_kwargs rollout.chat_scheduler"
    ),
    "a shared prompt is always computed once": "actor.use_prefix_grouper",
    "log-probs of the rollout are always recorded": "rollout.calculate_log_probs",
    "train.max_tokens_per_micro_batch cuts passes without gradients too, with the same result": (
        "*.log_prob_micro_batch_size *.log_prob_micro_batch_size_per_gpu *.log_prob_use_dynamic_bsz "
        "*.log_prob_max_token_len_per_gpu critic.*micro_batch_size* critic.*max_token_len_per_gpu "
        "critic.use_dynamic_bsz trainer.balance_batch"
    ),
    "the run's seed holds for everything": "*.seed *.full_determinism data.validation_shuffle actor.data_loader_seed",
    "msrun starts the workers, there is no Ray": (
        "ray_kwargs.* ray_init.* nccl_timeout trainer.ray_wait_register_center_timeout transfer_queue.* "
        "global_profiler.save_path trainer.esi_redundant_time trainer.worker_nccl_group"
    ),
    "rows are read by `mindrlhf data`, which keeps all columns": (
        "data.return_raw_chat data.return_raw_input_ids data.return_full_prompt data.return_multi_modal_inputs "
        "data.reward_fn_key data.dataloader_num_workers data.val_batch_size "
        "data.filter_overlong_prompts_workers *.trust_remote_code"
    ),
    "a checkpoint holds everything, the critic too": (
        "*.checkpoint.save_contents *.checkpoint.load_contents *.checkpoint.contents trainer.default_hdfs_dir "
        "trainer.del_local_ckpt_after_load trainer.remove_previous_ckpt_in_save trainer.max_critic_ckpt_to_keep "
        "critic.checkpoint.*"
    ),
    "reward functions are called row by row, in processes of their own": (
        "reward.reward_manager.source reward.reward_manager.module.name reward_model.launch_reward_fn_async "
        "reward.reward_kwargs.max_resp_len reward_model.reward_kwargs.max_resp_len"
    ),
}

# What is done in another place -> keys. {value} is the value given.
ELSEWHERE: Mapping[str, str] = {
    "infer_yaml.parallel_config.model_parallel={value}, with msrun; the result does not depend on it": (
        "rollout.tensor_model_parallel_size"
    ),
    "train_yaml.parallel_config.model_parallel={value}, with msrun; the result does not depend on it": (
        "actor.megatron.tensor_model_parallel_size actor.engine.tp"
    ),
    "train_yaml.parallel_config.pipeline_stage={value}, with msrun; the result does not depend on it": (
        "actor.megatron.pipeline_model_parallel_size actor.engine.pp"
    ),
    "train_yaml.parallel_config.use_seq_parallel={value}": (
        "actor.megatron.sequence_parallel actor.megatron.override_transformer_config.sequence_parallel"
    ),
    "msrun --worker_num, and parallel_config of the model YAMLs; the result does not depend on it": (
        "trainer.n_gpus_per_node trainer.nnodes *.ulysses_* *.fsdp_size *.data_parallel_size *.*expert_parallel_size "
        "*.moe_tensor_parallel_size rollout.pipeline_model_parallel_size *.megatron.*_parallel_size ref.engine.?p "
        "actor.engine.?p actor.engine.?tp actor.engine.?pp ref.engine.?tp ref.engine.?pp"
    ),
    "train_yaml.recompute_config.recompute={value}, where memory is short; the result does not depend on it": (
        "model.enable_gradient_checkpointing critic.model.enable_gradient_checkpointing"
    ),
    "train_yaml.recompute_config.recompute=True, where memory is short; the result does not depend on it": (
        "*.override_transformer_config.recompute_* *.engine.impl_cfg.recompute *.turbo_config.memory.recompute*"
    ),
    "memory.swap=True puts the reference model and the critic away too": (
        "ref.*.param_offload ref.*.optimizer_offload critic.*.param_offload critic.*.optimizer_offload *.grad_offload "
        "*.offload_policy"
    ),
    "context.device_target of the model YAMLs": "trainer.device",
    "model.model_config of both model YAMLs": "*.override_config *.override_config.* *.hf_config_path",
    "--template of `mindrlhf data`": "data.apply_chat_template_kwargs.* *.custom_chat_template",
    "the rows that your class makes, written as JSONL or parquet, for `mindrlhf data`": "data.custom_cls.*",
    "the answers of validation are always written, to <output>/validation": (
        "trainer.validation_data_dir trainer.log_val_generations"
    ),
    "metrics of memory and time (perf/) are always written": (
        "global_profiler.* *.profiler.* trainer.profile_steps trainer.npu_profile.*"
    ),
    "trainer.save_rollouts=True writes every rollout": "rollout.trace.*",
    "--max_prompt_length of `mindrlhf data`": "rollout.prompt_length",
}


@dataclass(frozen=True)
class Feature:
    """Feature of verl that this suite does not have.

    keys: those that are of no use without it; asking: keys of them that ask for it -> values with which they do not.
    instead: an alternative, or "".
    """

    name: str
    asking: Mapping[str, tuple[Any, ...]]
    keys: str = ""
    instead: str = ""


OFF = (None, False, 0, "", [], {})
ALWAYS: tuple[Any, ...] = ()
NOT_DONE = (
    Feature(
        "LoRA",
        {"*.lora_rank": OFF, "*.lora.rank": OFF, "*.lora_adapter_path": OFF, "*.lora.adapter_path": OFF},
        "*.lora_* *.lora.* *.target_modules *.exclude_modules",
        "all weights are trained",
    ),
    Feature(
        "a reward model",
        {"reward_model.enable": OFF, "reward.reward_model.enable": OFF},
        "reward.reward_model.* reward_model.model.* reward_model.rollout.* reward_model.enable_resource_pool "
        "reward_model.n_gpus_per_node reward_model.nnodes reward_model.*micro_batch_size* reward_model.max_length "
        "reward_model.strategy reward_model.ulysses_* reward_model.use_dynamic_bsz reward_model.profiler.* "
        "reward_model.forward_max_token_len_per_gpu reward_model.fsdp_config.* reward_model.megatron.*",
        "give reward functions",
    ),
    Feature(
        "rollouts of several turns, with tools",
        {
            "rollout.multi_turn.enable": OFF,
            "rollout.agent.default_agent_loop": (*OFF, "single_turn_agent"),
            "rollout.agent.agent_loop_config_path": OFF,
            "rollout.agent.custom_async_server.path": OFF,
            "data.tool_config_path": OFF,
            "data.function_tool_path": OFF,
        },
        "rollout.multi_turn.* rollout.agent.*",
    ),
    Feature("distillation", {"distillation.enabled": OFF}, "distillation.*"),
    Feature("multi-token prediction", {"*.mtp.enable": OFF}, "*.mtp.*"),
    Feature(
        "training while rollouts are made",
        {
            "async_training.*": ALWAYS,
            "rollout.total_rollout_steps": ALWAYS,
            "hybrid_engine": (True,),
            "trainer.v1.trainer_mode": (*OFF, "sync"),
        },
        "trainer.v1.* rollout.nnodes rollout.n_gpus_per_node data.gen_batch_size data.train_batch_size",
    ),
    Feature(
        "images, video and sound",
        {"data.image_key": OFF, "data.video_key": OFF, "data.audio_key": OFF, "actor.freeze_vision_tower": OFF},
        "data.image_patch_size data.mm_processor_kwargs rollout.limit_images",
        "models read text; leave the key out where the rows have only that",
    ),
    Feature(
        "routing of experts that is replayed",
        {"*.router_replay.mode": (*OFF, "disabled"), "rollout.enable_rollout_routing_replay": OFF},
        "*.router_replay.*",
    ),
    Feature(
        "quantisation",
        {"*.qat.enable": OFF, "rollout.quantization": OFF},
        "*.qat.* rollout.quantization_config_file",
    ),
    Feature("PF-PPO", {"algorithm.use_pf_ppo": OFF}, "algorithm.pf_ppo.*"),
    Feature("a sandbox for code", {"*sandbox_fusion.url": OFF}, "*sandbox_fusion.*", "give a reward function"),
    Feature(
        "classes of your own in verl's workers",
        {
            "*.external_lib": OFF,
            "data.sampler.class_path": OFF,
            "data.datagen.path": OFF,
            "reward.reward_manager.module.path": OFF,
            "reward_model.reward_loop_module_path": OFF,
        },
        "data.sampler.* data.datagen.* reward_model.reward_loop_*",
    ),
    Feature(
        "a reward manager that scores otherwise than row by row",
        dict.fromkeys(
            ("reward.reward_manager.name", "reward_model.reward_manager"), (*OFF, "naive", "dapo", "gdpo", "prime")
        ),
        instead="reward.functions",
    ),
    Feature(
        "normalising each part of one function's result",
        {"algorithm.gdpo_reward_keys": OFF},
        instead="give each part as a function of its own in reward.functions",
    ),
    Feature("mini-batches in random order", {"actor.shuffle": OFF, "critic.shuffle": OFF}, "critic.data_loader_seed"),
    Feature(
        "answers that go on after their end token",
        {"rollout.ignore_eos": OFF},
        instead="rollout.min_new_tokens forbids an early end",
    ),
    Feature("more rollouts than a step takes", {"rollout.over_sample_rate": OFF}),
    Feature(
        "training on a part of the rows", {"data.train_max_samples": (*OFF, -1)}, instead="convert these rows only"
    ),
    Feature(
        "rollouts from a cache",
        {"skip.*.enable": OFF, "rollout.skip_rollout": OFF, "rollout.skip.enable": OFF},
        "skip.* rollout.skip.* rollout.skip_*",
        "--replay takes those of --save_data_file",
    ),
    Feature("optimizers other than AdamW", {"*.optim.optimizer": (*OFF, "AdamW", "adamw", "Adam", "adam")}),
    Feature(
        "a learning rate of this form",
        {
            "*.optim.num_cycles": (*OFF, 0.5),
            "*.optim.lr_warmup_init": OFF,
            "*.optim.lr_decay_steps": OFF,
        },
        instead="optimizer.lr_decay and optimizer.warmup_steps",
    ),
    Feature(
        "training on log-probs of the rollout as the old policy's",
        {"algorithm.rollout_correction.bypass_mode": OFF},
        "algorithm.rollout_correction.loss_type",
        "rollout_correction weighs the difference",
    ),
    Feature("importance weights with a mean of 1", {"algorithm.rollout_correction.rollout_is_batch_normalize": OFF}),
    Feature(
        "the keys of verl 0.6's rollout correction",
        {"algorithm.rollout_is": OFF, "algorithm.rollout_is_threshold": OFF},
        "algorithm.rollout_is_* ",
        "give algorithm.rollout_correction.*",
    ),
)
