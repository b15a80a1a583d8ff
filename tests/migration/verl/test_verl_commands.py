"""verl's own example commands: every key of every one of them ends in one place, and none is lost.

data/commands.json: the arguments of the scripts below `examples/` of verl at the commit named in it, with the defaults
of their shell variables.
"""

import json
import shlex
from pathlib import Path

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.flags import TrainFlags
from mindrlhf.migration.verl.command import read_command
from mindrlhf.migration.verl.table import ELSEWHERE, FILE_DEFAULTS, NEEDLESS, NOT_DONE, VERL_DEFAULTS
from mindrlhf.migration.verl.translation import asked, translate
from mindrlhf.trainer.check import from_verl

COMMANDS = {
    command["script"]: command["arguments"]
    for command in json.loads((Path(__file__).parent / "data" / "commands.json").read_text())["commands"]
}
GRPO = [name for name, arguments in COMMANDS.items() if "algorithm.adv_estimator=grpo" in arguments]
QWEN_SCRIPTS = 30  # run_qwen*.sh in grpo_trainer of that commit
# Values of the commands that a rule refuses, because no setting here can have them.
REFUSED_VALUES = {
    "actor.policy_loss.loss_mode": ("dppo_tv",),
    "algorithm.adv_estimator": ("optimal_token_baseline",),
    "algorithm.rollout_correction.rollout_rs": ("token_k1", "token_k1,seq_max_k2"),
}


# Further keys in grpo_trainer/run_qwen*.sh, of branches that the scripts' defaults do not take.
ENGINE = "actor_rollout_ref.rollout.engine_kwargs.trtllm"
MEGATRON = "actor_rollout_ref.actor.megatron.override_transformer_config"
BRANCHES = (
    *(f"{ENGINE}.{value}" for value in ("batch_wait_timeout_iters=32", "batch_wait_max_tokens_ratio=0.5")),
    f"{ENGINE}.moe_config.backend=DEEPGEMM",
    *(f"{MEGATRON}.{value}" for value in ("use_triton_gdn=False", "use_ascend_gdn=True")),
    "ray_kwargs.ray_init.num_gpus=4",
)


@pytest.mark.parametrize("argument", BRANCHES)
def test_a_key_of_a_branch_is_needless_here(argument):
    translation = translate(f"algorithm.adv_estimator=grpo +{argument}")
    assert argument.partition("=")[0].removeprefix("actor_rollout_ref.") in translation.needless


def test_quantised_generation_of_a_branch_is_not_done():
    translation = translate("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.quantization=fp8")
    with pytest.raises(UserError, match=r"not done here: rollout\.quantization=fp8 \(quantisation\)"):
        translation.check()


def test_there_are_enough_of_them():
    assert len(GRPO) >= 50
    assert len(COMMANDS) > len(GRPO)
    assert sum(name.startswith("grpo_trainer/run_qwen") for name in COMMANDS) == QWEN_SCRIPTS


@pytest.mark.parametrize("script", COMMANDS)
def test_every_key_of_a_command_ends_in_one_place(script):
    translation = translate(shlex.join(COMMANDS[script]))
    given = translation.command.given
    values = {key for key, refused in REFUSED_VALUES.items() if given.get(key) in refused}
    assert translation.refused.keys() == asked(given).keys() | values
    groups = translation.elsewhere, translation.needless, translation.not_done
    for key in given:
        assert sum(key in place for place in (translation.used, *groups)) == 1, key
    assert all(words for group in groups for words in group.values())
    assert not translation.unknown
    load_grpo_config(overrides=translation.overrides)


@pytest.mark.parametrize("script", COMMANDS)
def test_the_report_shows_every_key_before_the_refusal(script, capsys):
    """Keys that are not done are shown in a group, beside the other ones; the sentence names those that ask for it."""
    flags = TrainFlags(from_verl=shlex.join(COMMANDS[script]))
    command = read_command(flags.from_verl)
    features = asked(command.given)
    try:
        from_verl(flags, [])
    except UserError as refusal:
        sentence = str(refusal)
        assert sentence.startswith("--from-verl: not done here: ")
        assert all(f"{key}={command(key)}" in sentence for key in features)
    else:
        assert not features
    report = capsys.readouterr().out
    for key, value in command.given.items():
        assert f" {key}={value}" in report, key
    shown, _, refused = report.partition("from verl, NOT DONE:\n")
    for key, feature in features.items():
        assert f"{key}={command(key)}" not in shown
        assert f"{feature}: " in refused


def test_more_grpo_commands_are_translated_than_refused():
    refused = [name for name in GRPO if asked(read_command(shlex.join(COMMANDS[name])).given)]
    assert len(refused) < len(GRPO) / 2


def test_a_key_is_in_one_table():
    """A name that is written out stands for one thing: a table's order does not decide about it."""
    features = [(feature.name, feature.keys) for feature in NOT_DONE]
    tables = [(words, keys.split()) for table in (ELSEWHERE, NEEDLESS) for words, keys in table.items()]
    seen: dict[str, str] = {}
    doubled = {"data.gen_batch_size"}  # of dynamic sampling, and of asynchronous training
    for words, keys in (*tables, *features):
        for key in keys:
            if "*" not in key:
                assert key not in seen or key in doubled, (key, words, seen[key])
                seen[key] = words
    assert not VERL_DEFAULTS.keys() & FILE_DEFAULTS.keys()
