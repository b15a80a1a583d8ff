"""verl command lines as settings: what is translated, what verl's defaults mean, and what is only listed."""

import pytest

from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml, ParallelSettings
from mindrlhf.configs.validate_algorithm import check_algorithm
from mindrlhf.configs.verl_keys import VERL_DEFAULTS, translate
from mindrlhf.errors import UserError

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


YAML = ModelYaml(
    path="infer.yaml",
    model=ModelSettings(),
    parallel=ParallelSettings(),
    context=ContextSettings(device_target="CPU"),
)


def settings(command: str) -> GRPOConfig:
    """The settings of a command line, which pass the checks across settings."""
    config = load_grpo_config(overrides=translate(command).overrides)
    check_algorithm(config, YAML)
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
    assert translation.flags == {"load_sft_checkpoint_infer": "models/Qwen2.5-7B"}
    assert set(translation.without) == {
        "data.train_files=train.parquet",
        "data.max_prompt_length=256",
        "actor.ppo_micro_batch_size_per_gpu=4",
        "rollout.name=vllm",
        "trainer.n_gpus_per_node=8",
    }
    assert "mindrlhf data" in translation.without["data.train_files=train.parquet"]


def test_what_is_left_out_is_verls_default():
    """Where ours is another: dual clip, token mean, no KL, AdamW's second decay."""
    config = settings("algorithm.adv_estimator=grpo")
    algorithm = config.algorithm
    assert (algorithm.dual_clip, algorithm.aggregation, algorithm.beta) == (3.0, "token-mean", 0.0)
    assert (algorithm.epsilon_low, algorithm.epsilon_high) == (0.2, 0.2)
    assert config.optimizer.beta2 == 0.999
    assert (config.data.prompts_per_step, algorithm.updates_per_iteration) == (1024, 4)
    assert settings("data.train_batch_size=8").algorithm.updates_per_iteration == 1


def test_every_default_is_read():
    everything = " ".join(f"{key}='{value}'" for key, value in VERL_DEFAULTS.items())
    assert translate(everything).without == {}


def test_ppo_with_its_critic():
    config = settings("critic.optim.lr=3e-5 critic.cliprange_value=0.2 trainer.critic_warmup=7 critic.grad_clip=0.5")
    assert config.algorithm.uses_critic
    assert (config.algorithm.gamma, config.algorithm.lam) == (1.0, 1.0)
    critic = config.critic
    assert (critic.optimizer.lr, critic.optimizer.max_grad_norm) == (3e-5, 0.5)
    assert (critic.value_clip, critic.warmup_steps) == (0.2, 7)
    without_critic = translate("algorithm.adv_estimator=rloo critic.optim.lr=1e-5 trainer.critic_warmup=0")
    assert without_critic.without == {}
    assert not any(text.startswith("critic.") for text in without_critic.overrides)


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
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_kl_loss=True "
            "actor_rollout_ref.actor.kl_loss_type=k3+",
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
    assert config.rollout.top_k == 20
    optimizer = config.optimizer
    assert (optimizer.warmup_steps, optimizer.lr_decay, optimizer.min_lr) == (5, "cosine", 5e-7)
    assert config.reward.functions[0].name == "mine.py:score"
    assert config.trainer.save_rollouts


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("data.train_files=$HOME/train.parquet", "holds a shell variable; give its value"),
        ("data.train_batch_size=10 actor_rollout_ref.actor.ppo_mini_batch_size=4", "10 is no multiple of .* 4"),
        ("data.train_batch_size=many", "data.train_batch_size is 'many', and should be a number"),
        ("python3 -m verl.trainer.main_ppo", "there is no key=value in it"),
        ("data.x='open", "cannot be read"),
        ("data.x=[1", "cannot be read"),
        (
            "actor_rollout_ref.actor.use_kl_loss=True algorithm.use_kl_in_reward=True",
            "are both True, and the KL term is in one place",
        ),
    ],
)
def test_what_cannot_be_translated(command, message):
    with pytest.raises(UserError, match=message):
        translate(command)


def test_the_report_names_both_sides():
    text = str(translate("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 ray.address=local"))
    assert "rollout.num_generations=5" in text
    assert "rollout.n=5" in text
    assert "(verl's default)" in text
    assert text.splitlines()[-1].split() == ["ray.address=local"]
