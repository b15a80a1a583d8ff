"""Names of TRL and verl as settings: answered with ours, never with a flag that does something else."""

import pytest

from mindrlhf.cli import main
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.errors import UserError
from mindrlhf.migration.other_names import answer
from mindrlhf.migration.trl.names import DEFAULTS, NEEDLESS, NOT_DONE, trl_names
from mindrlhf.migration.verl.table import COPIED


def refusal(word: str, load=load_grpo_config) -> str:
    with pytest.raises(UserError) as caught:
        load(overrides=[word], other_names=answer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("learning_rate=1e-6", "learning_rate is TRL's name; here it is optimizer.lr=1e-06."),
        ("per_device_train_batch_size=16", "here it is data.prompts_per_step=2."),
        ("max_completion_length=64", "here it is rollout.max_new_tokens=64 validation.max_new_tokens=64."),
        ("loss_type=dr_grpo", "here it is algorithm.policy_loss=clip algorithm.aggregation=dr_grpo."),
        ("warmup_ratio=0.1", "here it is optimizer.warmup_steps."),  # the number depends on the data
        ("report_to=none", """here it is 'trainer.loggers=["console", "jsonl"]'."""),
        ("max_staleness=2", "max_staleness is TRL's name; here it is trainer.staleness=2."),
        ("queue_maxsize=64", "it has no effect here: answers are drawn a fixed number of steps ahead, trainer.stalen"),
        ("weight_sync_steps=4", "weight_sync_steps is 4, which is not done here; set it to 1."),
        (
            "async_training.staleness_threshold=0.5",
            "here: training while rollouts are made; --trainer_ranks N --generator_ranks M trainer.staleness=1 is one",
        ),
        (
            "async_training.partial_rollout=True",
            "here: answers that go on with new weights; trainer.staleness=1 rollout.tokens_per_step=TOKENS goes on",
        ),
        ("async_training.partial_rollout=False", "here: training while rollouts are made"),
        ("use_vllm=True", "it has no effect here: the engine that trains also generates."),
        ("max_steps=abc", "here it is trainer.total_steps, with another value."),
        ("actor_rollout_ref.rollout.n=5", "actor_rollout_ref.rollout.n is verl's name; here it is rollout.num_gener"),
        (
            "data.max_response_length=64",
            "data.max_response_length is verl's name; here it is rollout.max_new_tok",
        ),
        ("algorithm.adv_estimator=rloo", "here it is algorithm.advantage=rloo."),
        ("trainer.total_epochs=3", "here it is trainer.epochs=3."),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "here: one engine generates here"),
        (
            "chunk_size=4",
            "chunk_size is MindRLHF's name; here it is data.prompts_per_step, which is chunk_size x",
        ),
        ("rl_config.start_lr=1e-6", "rl_config.start_lr is MindRLHF's name; here it is optimizer.lr."),
        (
            "trainer.save_ckpt_interval=5",
            "trainer.save_ckpt_interval is MindRLHF's name; here it is trainer.save_freq.",
        ),
        ("lr_decay_style=cosine", "lr_decay_style is MindRLHF's name; here it is optimizer.lr_decay."),
        ("enable_oldpolicy=True", "it has no effect here: old log-probs are computed where several updates need them."),
        ("num_generations=8", "unknown key num_generations; did you mean rollout.num_generations?"),
        ("temprature=1", "unknown key temprature; did you mean rollout.temperature?"),
    ],
)
def test_a_name_of_another_suite_is_answered_with_ours(word, ours):
    assert ours in refusal(word)


def test_a_name_in_a_file_is_answered_with_its_place(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text("seed: 1\nlearning_rate: 1.0e-6\n")
    with pytest.raises(UserError, match=r"a.yaml:2: learning_rate is TRL's name; here it is optimizer.lr=1e-06"):
        load_grpo_config(file, other_names=answer)


def test_fine_tuning_has_its_own_answer():
    assert "here it is data.pairs_per_step=4." in refusal("per_device_train_batch_size=4", load_sft_config)


def test_every_key_of_the_tables_is_answered():
    named = {key for key in trl_names(GRPOSettings) if "=" not in key}
    for key in {*NEEDLESS, *NOT_DONE, *DEFAULTS, *named} - {"seed"}:
        words = refusal(f"{key}=7")
        assert "TRL's name" in words or "did you mean" in words, key
    for theirs in (key for keys in COPIED.values() for key in keys.split()):
        try:
            words = refusal(f"{theirs}=7")
        except pytest.fail.Exception:
            continue  # the same name here
        assert "verl's name" in words or "did you mean" in words or "must be" in words, theirs


@pytest.mark.parametrize(
    "word", ["num_generations=8", "--num_generations=8", "--max_new_tokens=8", "--save_strategy=no"]
)
def test_no_flag_stands_in_the_way(word, capsys):
    assert main(["train", "--mind_dataset_dir", "x", "--load_sft_checkpoint_infer", "y", word]) == 2
    words = capsys.readouterr().err
    assert "flag" not in words
    assert "pre_num_generations" not in words
