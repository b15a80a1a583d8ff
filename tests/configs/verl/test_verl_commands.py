"""verl's own example commands: every key of every one of them ends in one place, and none is lost.

data/commands.json: the arguments of the scripts below `examples/` of verl at the commit named in it, with the defaults
of their shell variables.
"""

import json
import shlex
from pathlib import Path

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.verl.command import read_command
from mindrlhf.configs.verl.table import ELSEWHERE, FILE_DEFAULTS, NEEDLESS, NOT_DONE, VERL_DEFAULTS
from mindrlhf.configs.verl.translation import asked, translate
from mindrlhf.errors import UserError

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
    with pytest.raises(UserError, match=r"not done here: rollout\.quantization=fp8 \(quantisation\)"):
        translate("algorithm.adv_estimator=grpo actor_rollout_ref.rollout.quantization=fp8")


def test_there_are_enough_of_them():
    assert len(GRPO) >= 50
    assert len(COMMANDS) > len(GRPO)
    assert sum(name.startswith("grpo_trainer/run_qwen") for name in COMMANDS) == QWEN_SCRIPTS


@pytest.mark.parametrize("script", COMMANDS)
def test_every_key_of_a_command_ends_in_one_place(script):
    arguments = COMMANDS[script]
    given = read_command(shlex.join(arguments)).given
    features, values = set(asked(given)), {key for key, refused in REFUSED_VALUES.items() if given.get(key) in refused}
    not_done = features | values
    if not_done:
        with pytest.raises(UserError, match="--from-verl: not done here: ") as refusal:
            translate(shlex.join(arguments))
        for key in features or values:
            assert f"{key}=" in str(refusal.value)
        arguments = [word for word in arguments if not any(key in word.partition("=")[0] for key in not_done)]
        if "async_training" in str(not_done):  # its batches are 0
            arguments = [word for word in arguments if "data.train_batch_size" not in word and "gen_batch" not in word]
    translation = translate(shlex.join(arguments))
    places = [translation.used, translation.elsewhere.keys(), translation.needless.keys()]
    for key in given.keys() - not_done:
        if any(key in word for word in arguments):
            assert sum(key in place for place in places) == 1, key
    assert all(words for words in (*translation.elsewhere.values(), *translation.needless.values()))
    assert not translation.unknown
    load_grpo_config(overrides=translation.overrides)


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
