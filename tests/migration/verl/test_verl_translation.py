"""verl command lines as settings: what is translated, what verl's defaults mean, and what is only listed."""

import argparse
import shlex
from pathlib import Path

import pytest

from mindrlhf.commands.train import add_arguments
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml
from mindrlhf.configs.validate import ORDER, check_algorithm, check_dynamic_sampling, check_order
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.migration.verl.table import FILE_DEFAULTS, VERL_DEFAULTS
from mindrlhf.migration.verl.translation import translate
from mindrlhf.trainer.check import from_verl

GRPO = r"""
    python3 -m verl.trainer.main_ppo \
        algorithm.adv_estimator=grpo \
        data.train_files=$HOME_IS_EXPANDED \
        data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=1024 \
        actor_rollout_ref.model.path=models/Qwen2.5-7B \
        actor_rollout_ref.actor.optim.lr=2e-6 \
        actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
        actor_rollout_ref.actor.use_kl_loss=True \
        actor_rollout_ref.actor.kl_loss_coef=0.002 \
        +actor_rollout_ref.actor.kl_loss_type=low_var_kl \
        actor_rollout_ref.rollout.n=5 \
        actor_rollout_ref.rollout.name=vllm \
        trainer.logger='["console","wandb"]' trainer.n_gpus_per_node=8 trainer.total_epochs=2
""".replace("$HOME_IS_EXPANDED", "train.parquet")


YAML = ModelYaml(path="infer.yaml", context=ContextSettings(device_target="CPU"))


def settings(command: str) -> GRPOSettings:
    """The settings of a command line, which pass the checks across settings."""
    config = load_grpo_config(overrides=translate(command).overrides)
    check_algorithm(config.algorithm)
    check_order(config, ORDER)
    check_dynamic_sampling(config, YAML)
    return config


def test_a_grpo_command():
    translation = translate(GRPO)
    config = settings(GRPO)
    algorithm = config.algorithm
    assert (config.data.prompts_per_step, algorithm.updates_per_iteration) == (64, 4)
    assert (config.rollout.max_new_tokens, config.rollout.num_generations) == (1024, 5)
    assert (algorithm.beta, algorithm.kl_estimator, algorithm.kl_in_reward) == (0.002, "low_var_kl", False)
    assert (config.optimizer.lr, config.trainer.epochs) == (2e-6, 2)
    assert config.trainer.loggers == ("console", "jsonl", "wandb")
    assert config.train.max_tokens_per_micro_batch == 4 * (256 + 1024)
    assert translation.flags == {
        "load_sft_checkpoint_infer": "models/Qwen2.5-7B",
        "mind_dataset_dir": "train.parquet",
        "save_ckpt_dir": "checkpoints/verl_examples/gsm8k",
        "output_dir": "checkpoints/verl_examples/gsm8k",
    }
    assert (config.data.max_prompt_length, config.data.truncation) == (256, "error")
    assert translation.elsewhere.keys() == {"trainer.n_gpus_per_node"}
    assert translation.needless.keys() == {"rollout.name"}


def test_what_is_left_out_is_verls_default():
    """Where ours is another: dual clip, token mean, no KL, AdamW's second decay."""
    config = settings("algorithm.adv_estimator=grpo")
    algorithm = config.algorithm
    assert (algorithm.dual_clip, algorithm.aggregation, algorithm.beta) == (3.0, "token-mean", 0.0)
    assert (algorithm.epsilon_low, algorithm.epsilon_high) == (0.2, 0.2)
    assert config.optimizer.beta2 == 0.999
    assert (config.data.prompts_per_step, algorithm.updates_per_iteration) == (1024, 4)
    assert settings("data.train_batch_size=8").algorithm.updates_per_iteration == 1


def test_every_default_is_known():
    everything = FILE_DEFAULTS | VERL_DEFAULTS | dict.fromkeys(["data.image_key", "data.video_key", "data.audio_key"])
    words = [f"{key}={'null' if value is None else value}" for key, value in everything.items()]
    assert not translate(shlex.join(words)).unknown


def test_ppo_with_its_critic():
    config = settings("critic.optim.lr=3e-5 critic.cliprange_value=0.2 trainer.critic_warmup=7 critic.grad_clip=0.5")
    assert config.algorithm.uses_critic
    assert (config.algorithm.gamma, config.algorithm.lam) == (1.0, 1.0)
    critic = config.critic
    assert (critic.optimizer.lr, critic.optimizer.max_grad_norm) == (3e-5, 0.5)
    assert (critic.value_clip, critic.warmup_steps) == (0.2, 7)
    without_critic = translate("algorithm.adv_estimator=rloo critic.optim.lr=1e-5 trainer.critic_warmup=0")
    assert without_critic.needless.keys() == {"critic.optim.lr", "trainer.critic_warmup"}
    assert not any(text.startswith("critic.") for text in without_critic.overrides)


TOOL = "class_name: {0}, config: {{type: native}}, tool_schema: {{type: function, function: {{name: {1}}}}}"


def test_tools(tmp_path):
    path = tmp_path / "tools.yaml"
    path.write_text(f"tools:\n  - {{{TOOL.format('recipe.retool.retool.Sandbox', 'code_interpreter')}}}\n")
    command = (
        "algorithm.adv_estimator=grpo data.train_files=a.parquet rollout.multi_turn.enable=True "
        f"rollout.multi_turn.tool_config_path={path} rollout.agent.default_agent_loop=tool_agent "
        "rollout.multi_turn.max_parallel_calls=1"
    )
    rollout = settings(f"{command} rollout.multi_turn.max_assistant_turns=6 rollout.multi_turn.format=hermes").rollout
    assert (rollout.tools, rollout.max_turns, rollout.tool_format) == (("python",), 6, "hermes")
    assert settings(command).rollout.max_turns == 1000  # verl has no limit of its own
    path.write_text(f"tools:\n  - {{{TOOL.format('verl.tools.search_tool.SearchTool', 'search')}}}\n")
    with pytest.raises(UserError, match=r"names the tool 'search' \(verl.tools.search_tool.SearchTool\), and here are"):
        translate(command).check()
    path.write_text("tools: [{class_name: Search}]")
    with pytest.raises(UserError, match="has a tool without tool_schema"):
        translate(command)
    off = translate(f"{command} rollout.multi_turn.enable=False")
    assert not any("tools" in text for text in off.overrides)


def test_dapos_recipe():
    config = settings(
        "algorithm.adv_estimator=grpo data.train_batch_size=8 data.gen_batch_size=24 "
        "actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 "
        "actor_rollout_ref.actor.clip_ratio_c=10.0 actor_rollout_ref.rollout.n=16 "
        "+algorithm.filter_groups.enable=True +algorithm.filter_groups.max_num_gen_batches=5 "
        "+algorithm.filter_groups.metric=acc reward_model.overlong_buffer.enable=True "
        "reward_model.overlong_buffer.len=100 reward_model.overlong_buffer.penalty_factor=0.5"
    )
    sampling = config.dynamic_sampling
    assert (sampling.enabled, sampling.max_rounds, sampling.prompts_per_round) == (True, 5, 24)
    assert (config.reward.overlong_factor, config.reward.overlong_buffer) == (0.5, 100)
    assert (config.algorithm.epsilon_high, config.algorithm.dual_clip) == (0.28, 10.0)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (
            "algorithm.adv_estimator=rloo algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl "
            "algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0.1 algorithm.kl_ctrl.target_kl=6 "
            "algorithm.kl_ctrl.horizon=500",
            {"kl_in_reward": True, "kl_estimator": "k1", "beta": 0.1, "kl_target": 6.0, "kl_horizon": 500},
        ),
        ("algorithm.adv_estimator=gdpo", {"advantage": "grpo", "normalize_functions": True}),
        (
            "algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False "
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
            "actor_rollout_ref.actor.loss_scale_factor=99",
            {"advantage_std": "none", "aggregation": "seq-mean-token-sum-norm", "aggregation_tokens": 99},
        ),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=clip-cov "
            "actor_rollout_ref.actor.policy_loss.clip_cov_lb=2",
            {"policy_loss": "clip_cov", "clip_cov_lb": 2.0, "dual_clip": None},
        ),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=sapo "
            "actor_rollout_ref.actor.tau_neg=1.2 actor_rollout_ref.actor.entropy_coeff=0.001",
            {"policy_loss": "sapo", "tau_negative": 1.2, "entropy_coef": 0.001, "epsilon_low": None},
        ),
        (
            "algorithm.adv_estimator=grpo actor.use_kl_loss=True actor.kl_loss_type=k3+",
            {"kl_estimator": "low_var_kl+", "beta": 0.001},
        ),
    ],
)
def test_algorithm_keys(command, expected):
    algorithm = settings(command).algorithm
    assert {name: getattr(algorithm, name) for name in expected} == expected


def test_other_groups():
    config = settings(
        "algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=sequence "
        "algorithm.rollout_correction.rollout_is_threshold=4 actor_rollout_ref.rollout.top_k=20 "
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 trainer.total_training_steps=50 "
        "actor_rollout_ref.actor.optim.warmup_style=cosine actor_rollout_ref.actor.optim.min_lr_ratio=0.5 "
        "custom_reward_function.path=mine.py custom_reward_function.name=score trainer.rollout_data_dir=x"
    )
    assert (config.rollout_correction.level, config.rollout_correction.upper) == ("sequence", 4.0)
    rate = config.optimizer
    assert (config.rollout.top_k, rate.warmup_steps, rate.lr_decay, rate.min_lr) == (20, 5, "cosine", 5e-7)
    assert config.reward.functions[0].name == "mine.py:score"
    assert config.trainer.save_rollouts


def test_the_report_names_both_sides_and_every_group():
    text = str(
        translate(
            "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 data.train_files=a.parquet "
            "trainer.nnodes=2 ray_kwargs.ray_init.num_cpus=3 actor_rollout_ref.model.lora_rank=0"
        )
    )
    lines = [line.strip() for line in text.splitlines()]
    assert "rollout.num_generations=5" in text
    assert "rollout.n=5" in text
    assert "(verl's default)" in text
    titles = [line for line in lines if line.startswith("from verl")]
    assert [title.removeprefix("from verl") for title in titles] == [
        ":",
        ", done elsewhere:",
        ", needless here:",
    ]
    assert any(line.split() == ["--mind_dataset_dir", "a.parquet", "data.train_files=a.parquet"] for line in lines)
    assert any(line.startswith("msrun ") and line.endswith(": trainer.nnodes=2") for line in lines)
    assert "no adapters of the policy are asked for: model.lora_rank=0" in lines
    assert "msrun starts the workers, there is no Ray: ray_kwargs.ray_init.num_cpus=3" in lines


def test_checkpoints_validation_and_resuming():
    config = settings(
        "algorithm.adv_estimator=grpo trainer.save_freq=20 trainer.max_actor_ckpt_to_keep=3 trainer.test_freq=5 "
        "trainer.val_before_train=False trainer.val_only=True trainer.resume_mode=resume_path "
        "trainer.resume_from_path=out/step_20 data.val_files=test.parquet data.val_max_samples=100 "
        "actor_rollout_ref.rollout.val_kwargs.n=4 actor_rollout_ref.rollout.val_kwargs.do_sample=True "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.top_p=0.95 "
        "actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.actor.checkpoint.async_save=True "
        "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    )
    trainer, validation = config.trainer, config.validation
    assert (trainer.save_freq, trainer.save_max_ckpt_num, trainer.async_save) == (20, 3, True)
    assert (trainer.test_freq, trainer.val_before_train, trainer.val_only) == (5, False, True)
    assert (trainer.resume_mode, trainer.resume_from_path) == ("resume_path", "out/step_20")
    assert (config.data.val_dataset, validation.limit) == ("test.parquet", 100)
    assert (validation.num_generations, validation.temperature) == (4, 0.6)
    assert (validation.top_p, validation.top_k) == (0.95, 0)
    assert config.memory.swap


def test_what_is_switched_off_and_verls_defaults_of_checkpoints():
    off = settings(
        "algorithm.adv_estimator=grpo trainer.save_freq=-1 trainer.test_freq=0 trainer.resume_mode=disable "
        "trainer.resume_from_path=null data.val_max_samples=-1 trainer.total_training_steps=null"
    )
    assert (off.trainer.save_freq, off.trainer.test_freq, off.trainer.resume_mode) == (None, None, "disable")
    assert (off.validation.limit, off.trainer.total_steps) == (None, None)
    kept = settings("algorithm.adv_estimator=grpo trainer.save_freq=1").trainer
    assert (kept.save_max_ckpt_num, kept.resume_mode) == (None, "auto")


def test_datasets_of_several_files():
    translation = translate(
        'data.train_files=\'["d/gsm8k/train.parquet", "d/math/train.parquet"]\' data.val_files=d/test.mindrecord '
        "data.filter_overlong_prompts=True data.truncation=left data.prompt_key=question data.max_prompt_length=99"
    )
    assert translation.flags["mind_dataset_dir"] == "d/gsm8k/train.parquet,d/math/train.parquet"
    data = load_grpo_config(overrides=translation.overrides).data
    assert (data.max_prompt_length, data.truncation, data.fields) == (99, "drop", ("prompt=question",))
    assert data.val_dataset == "d/test.mindrecord"


def test_variables_of_the_chat_template():
    config = settings("algorithm.adv_estimator=grpo +data.apply_chat_template_kwargs.enable_thinking=False")
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    config = settings("algorithm.adv_estimator=grpo data.apply_chat_template_kwargs='{a: 1}'")
    assert config.data.chat_template_kwargs == {"a": 1}


@pytest.mark.parametrize(
    ("command", "swap"),
    [
        ("actor_rollout_ref.ref.fsdp_config.param_offload=True", True),
        ("actor.fsdp_config.param_offload=False ref.fsdp_config.param_offload=True", True),
        ("actor.megatron.grad_offload=True", True),
        ("actor.fsdp_config.offload_policy=True", True),
        ("critic.model.fsdp_config.optimizer_offload=True", True),
        ("actor.fsdp_config.param_offload=False actor.fsdp_config.optimizer_offload=False", False),
        ("", False),
    ],
)
def test_offloading_of_one_role_alone_is_swap(command, swap):
    assert settings(f"algorithm.adv_estimator=grpo {command}").memory.swap == swap


def test_folders_and_tokenizers_become_flags():
    flags = translate("trainer.default_local_dir=ckpts/a data.tokenizer=tok actor_rollout_ref.model.path=m").flags
    folders = {"save_ckpt_dir": "ckpts/a", "output_dir": "ckpts/a"}
    assert flags == folders | {"tokenizer_path": "tok", "load_sft_checkpoint_infer": "m"}
    default = translate("trainer.project_name=p trainer.experiment_name=e actor.optim.lr=1e-6").flags
    assert default == {"save_ckpt_dir": "checkpoints/p/e", "output_dir": "checkpoints/p/e"}


@pytest.mark.parametrize(
    ("command", "tokens"),
    [
        ("actor.use_dynamic_bsz=True actor.ppo_max_token_len_per_gpu=24576", 24576),
        ("actor.use_dynamic_bsz=True", 16384),
        ("actor.ppo_max_token_len_per_gpu=24576", None),
        ("actor.ppo_micro_batch_size_per_gpu=2 data.max_prompt_length=100 data.max_response_length=28", 256),
        ("actor.ppo_micro_batch_size=32 trainer.n_gpus_per_node=4 trainer.nnodes=2", 4 * 1024),
        ("actor.use_dynamic_bsz=True actor.ppo_micro_batch_size_per_gpu=2", 16384),
    ],
)
def test_micro_batches(command, tokens):
    """Rows of prompt and response, or tokens: whichever verl counts."""
    found = [text for text in translate(command).overrides if text.startswith("train.max_tokens_per_micro_batch=")]
    assert found == ([] if tokens is None else [f"train.max_tokens_per_micro_batch={tokens}"])


@pytest.mark.parametrize(
    ("command", "prompts", "updates"),
    [
        ("data.train_batch_size=8", 8, 1),
        ("data.train_batch_size=512", 512, 2),
        ("data.train_batch_size=64 actor.ppo_mini_batch_size=16 rollout.n=4", 64, 4),
        ("data.train_batch_size=64 data.gen_batch_size=32 actor.ppo_mini_batch_size=16", 32, 2),
        (
            "data.train_batch_size=64 data.gen_batch_size=96 actor.ppo_mini_batch_size=16 rollout.n=4 "
            "algorithm.filter_groups.enable=True",
            64,
            4,
        ),
    ],
)
def test_batches(command, prompts, updates):
    """verl's batches count prompts, before they are repeated n times."""
    config = settings(f"algorithm.adv_estimator=grpo {command}")
    assert (config.data.prompts_per_step, config.algorithm.updates_per_iteration) == (prompts, updates)


def test_reward_functions():
    config = settings(
        "algorithm.adv_estimator=grpo reward.custom_reward_function.path=mine.py "
        "+reward.custom_reward_function.reward_kwargs.strict=True reward.num_workers=3 "
        "+reward.reward_kwargs.overlong_buffer_cfg.enable=True +reward.reward_kwargs.overlong_buffer_cfg.len=64"
    )
    (function,) = config.reward.functions
    assert (function.name, function.args) == ("mine.py:compute_score", {"strict": True})
    assert (config.reward.workers, config.reward.overlong_factor, config.reward.overlong_buffer) == (3, 1.0, 64)


def test_verls_own_rewards_go_by_the_data_source():
    config = settings("algorithm.adv_estimator=grpo")
    assert [function.name for function in config.reward.functions] == ["verl"]
    assert config.validation.reward == "verl"


def test_rollout_correction_by_a_range_of_weights():
    found = settings(
        "algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token "
        "algorithm.rollout_correction.rollout_is_threshold=0.5_4.0"
    ).rollout_correction
    assert (found.level, found.mode, found.lower, found.upper) == ("token", "mask", 0.5, 4.0)
    found = settings(
        "algorithm.adv_estimator=grpo algorithm.rollout_correction.rollout_is=token "
        "algorithm.rollout_correction.rollout_rs=token algorithm.rollout_correction.rollout_rs_threshold=4"
    ).rollout_correction
    assert (found.mode, found.lower, found.upper) == ("mask", 0.25, 4.0)


def test_the_aggregation_that_a_loss_is_defined_with():
    algorithm = settings("algorithm.adv_estimator=grpo actor.policy_loss.loss_mode=gspo").algorithm
    assert algorithm.aggregation == "seq-mean-token-mean"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("model.lora_alpha=64 model.target_modules=[q_proj]", (0, 32.0, "all-linear", (), None)),
        ("model.lora_rank=8 model.target_modules=[q_proj]", (8, 16.0, ("q_proj",), (), None)),
        ("model.lora_rank=8 model.lora_alpha=64 model.exclude_modules=.*o", (8, 64.0, "all-linear", ".*o", None)),
        ("model.lora_adapter_path=a model.lora_rank=64", (0, 32.0, "all-linear", (), "a")),
        ("model.lora.rank=8", (8, 32.0, "all-linear", (), None)),
        ("model.lora.rank=8 model.lora.dropout=0.05", (8, 32.0, "all-linear", (), None)),
        (
            "model.lora.type=canonical_lora model.lora.rank=8 model.lora.alpha=4 model.lora.target_modules=[linear_qkv,"
            "linear_fc1_up] model.lora.exclude_modules=[linear_fc2] model.lora.lora_A_init_method=kaiming",
            (8, 4.0, ("q_proj", "k_proj", "v_proj", "up_proj"), ("down_proj",), None),
        ),
        ("model.lora.adapter_path=a", (0, 32.0, "all-linear", (), "a")),
    ],
)
def test_adapters(command, expected):
    lora = settings(f"algorithm.adv_estimator=grpo {command}").lora
    assert (lora.rank, lora.alpha, lora.target_modules, lora.exclude_modules, lora.adapter_path) == expected
    assert lora.dropout == (0.05 if "dropout" in command else 0)


def test_flags_go_before_those_of_verl(capsys):
    """`--save_ckpt_dir` has a default, which a verl command goes over, and a value, which it does not."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    yamls = ["--sft_path_infer", "i", "--sft_path_train", "t"]
    words = "trainer.default_local_dir=theirs data.train_files=a.parquet data.train_batch_size=8"
    for given, folder in (([], "theirs"), (["--save_ckpt_dir", "out/ckpt"], "out/ckpt")):
        flags = TrainFlags.of(parser.parse_args([*yamls, *given, "--from-verl", words]))
        flags, overrides = from_verl(flags, ["seed=3"])
        assert (flags.save_ckpt_dir, flags.mind_dataset_dir) == (Path(folder), "a.parquet")
        assert flags.output_dir == (None if given else Path("theirs"))
        assert overrides[-1] == "seed=3"
        assert "data.prompts_per_step=8" in overrides
    assert "from verl:" in capsys.readouterr().out
