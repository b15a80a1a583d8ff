"""verl command lines that are refused: what cannot be read, what is not done here, and unknown keys."""

import pytest

from mindrlhf.errors import UserError
from mindrlhf.migration.verl.translation import translate


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "data.train_files=$NOT_SET/x.parquet",
            "holds a shell variable or command whose value is not known; append data",
        ),
        ("data.train_batch_size=10 actor_rollout_ref.actor.ppo_mini_batch_size=4", "10 is no multiple of .* 4"),
        ("data.train_batch_size=many", "data.train_batch_size is 'many', and should be a number"),
        ("python3 -m verl.trainer.main_ppo", "there is no key=value in it"),
        ("data.x='open", "cannot be read"),
        ("data.x=[1", "cannot be read"),
        ("actor.use_kl_loss=True algorithm.use_kl_in_reward=True", "both True, and the KL term is in one place"),
    ],
)
def test_what_cannot_be_translated(command, message):
    with pytest.raises(UserError, match=message):
        translate(command).check()


@pytest.mark.parametrize(
    ("command", "feature"),
    [
        ("critic.model.lora_rank=32", "critic.model.lora_rank=32 (LoRA of the critic"),
        ("critic.model.lora.rank=32", "critic.model.lora.rank=32 (LoRA of the critic"),
        ("model.lora.rank=32 model.lora.type=dora", "model.lora.type=dora (adapters are plain LoRA here"),
        ("model.lora.rank=8 model.lora.target_modules=[router]", "model.lora.target_modules=['router'] (router is"),
        ("reward.reward_model.enable=True", "reward.reward_model.enable=True (a reward model"),
        ("reward_model.enable=True", "reward_model.enable=True (a reward model"),
        ("rollout.agent.default_agent_loop=my_agent", "rollout.agent.default_agent_loop=my_agent (agent loops"),
        (
            "rollout.multi_turn.enable=True rollout.multi_turn.format=gpt-oss",
            "rollout.multi_turn.format=gpt-oss (rollout",
        ),
        ("rollout.multi_turn.enable=True rollout.multi_turn.max_user_turns=2", "rollout.multi_turn.max_user_turns=2 ("),
        ("data.image_key=images", "data.image_key=images (images"),
        ("distillation.enabled=True", "distillation.enabled=True (distillation"),
        ("actor_rollout_ref.actor.optim.optimizer=SGD", "actor.optim.optimizer=SGD (optimizers other than AdamW"),
        ("actor.optim.lr_scheduler_type=WSD", "actor.optim.lr_scheduler_type=WSD (optimizer.lr_decay"),
        ("data.truncation=middle", "data.truncation=middle (data.truncation is one of error, left, right, drop)"),
        ("actor_rollout_ref.actor.shuffle=True", "actor.shuffle=True (mini-batches in random order"),
        ("critic.ppo_epochs=4", "critic.ppo_epochs=4 (the critic has the actor's, 1"),
    ],
)
def test_what_is_not_done_is_refused(command, feature):
    with pytest.raises(UserError) as refusal:
        translate(f"algorithm.adv_estimator=gae {command}").check()
    assert str(refusal.value).startswith(f"--from-verl: not done here: {feature}")


def test_a_share_of_steps_needs_their_number():
    with pytest.raises(UserError, match=r"lr_warmup_steps_ratio=0\.1 is a share of the run's updates"):
        translate("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1")


@pytest.mark.parametrize(
    ("command", "nearest"),
    [
        ("actor_rollout_ref.rollout.nn=5", "rollout.n"),
        ("trainer.safe_freq=5", "trainer.save_freq"),
        ("+data.trian_batch_size=5", "data.train_batch_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(command, nearest):
    with pytest.raises(UserError, match=rf"is no key of verl's that is known here \(did you mean {nearest}\?\)"):
        translate(command).check()


def test_keys_of_a_feature_that_is_not_done_are_shown_with_it():
    """Keys that another value would give a meaning do not come to nothing in silence."""
    translation = translate(
        "algorithm.adv_estimator=grpo rollout.n=5 rollout.name=vllm distillation.enabled=True distillation.topk=4 "
        "actor.policy_loss.loss_mode=dppo_tv actor.clip_ratio_low=0.3 data.train_batch_size=0 data.gen_batch_size=1 "
        "async_training.staleness_threshold=0.5"
    )
    assert translation.refused.keys() == {
        *("distillation.enabled", "actor.policy_loss.loss_mode", "async_training.staleness_threshold"),
    }
    followers = {"distillation.topk", "actor.clip_ratio_low", "data.train_batch_size", "data.gen_batch_size"}
    assert translation.not_done.keys() == translation.refused.keys() | followers
    report = str(translation)
    group = report.partition("from verl, NOT DONE:\n")[2].splitlines()
    assert group[0].startswith("  distillation; ")
    assert group[0].endswith(": distillation.enabled=True, distillation.topk=4")
    assert "from verl, needless here:\n  one engine generates here" in report
    assert "rollout.num_generations=5" in report


def test_an_estimator_that_is_not_done_keeps_its_keys():
    translation = translate("algorithm.adv_estimator=mine algorithm.gamma=0.9 algorithm.norm_adv_by_std_in_grpo=False")
    assert translation.not_done.keys() == translation.command.given.keys()


def test_thresholds_of_a_correction_that_is_not_done():
    group = "algorithm.rollout_correction"
    translation = translate(f"algorithm.adv_estimator=grpo {group}.rollout_is=turn {group}.rollout_is_threshold=2")
    assert translation.not_done.keys() == {f"{group}.rollout_is", f"{group}.rollout_is_threshold"}
