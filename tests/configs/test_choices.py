"""A chosen method takes no options of the layers below that it does not have; only the chooser's own are refused."""

import logging

import pytest
from slow_cases import few_of

from mindrlhf.algorithms.advantages import ADVANTAGES
from mindrlhf.algorithms.losses import POLICY_LOSSES
from mindrlhf.api.config import GRPOConfig
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.validate import check_algorithm, check_lora
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import shipped_yamls

PRESETS = [name for name in shipped_yamls() if name.startswith("preset:")]
# Of one method each, and of settings that several methods have.
FEW = ["preset:trl", "preset:dapo", "preset:ppo", "preset:cispo"]
EACH = few_of(FEW, [name for name in PRESETS if name not in FEW])
OWN = "def f(rewards, *, advantage_eps: float = 0.5):\n    return rewards\n\n\ndef g(rewards):\n    return rewards\n"


def chosen(preset: str, **choice):
    """Settings from the command line and from Python, which must agree."""
    line = [f"algorithm.{name}={value}" for name, value in choice.items()]
    config = load_grpo_config(preset, line)
    assert GRPOConfig("o", grpo_config=preset, algorithm=choice).settings() == config
    check_algorithm(config.algorithm)
    return config.algorithm


@pytest.mark.parametrize("preset", EACH)
def test_every_advantage_over_every_preset(preset):
    for name in ADVANTAGES:
        teacher = {"teacher": "some/model"} if name == "distillation" else {}
        algorithm = chosen(preset, advantage=name, **teacher)
        assert algorithm.options_of(algorithm.method).keys() <= algorithm.method.options.keys()


@pytest.mark.parametrize("preset", EACH)
def test_every_policy_loss_over_every_preset(preset):
    for name in POLICY_LOSSES:
        assert chosen(preset, policy_loss=name).policy_loss == name


def test_own_functions_over_a_preset(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    takes = chosen("preset:trl", advantage=f"{tmp_path}/mine.py:f")
    assert takes.options_of(takes.method) == {"advantage_eps": 1e-4}, "a function that has the option gets it"
    assert chosen("preset:trl", advantage=f"{tmp_path}/mine.py:g").advantage_eps is None
    assert chosen("preset:dapo", policy_loss=f"{tmp_path}/mine.py:g").epsilon_high is None


def test_what_the_method_has_stays():
    assert chosen("preset:trl", advantage="grpo_passk").advantage_eps == 1e-4
    assert chosen("preset:dapo", policy_loss="cispo").epsilon_high == 0.28
    assert load_grpo_config("preset:trl", ["algorithm.beta=0.1"]).algorithm.advantage_eps == 1e-4


def test_the_last_choice_counts(tmp_path):
    (tmp_path / "a.yaml").write_text("base_config: preset:trl\nalgorithm: {advantage: rloo}\n")
    config = load_grpo_config(tmp_path / "a.yaml", ["algorithm.advantage=grpo"])
    assert config.algorithm.advantage_eps == 1e-4


@pytest.mark.parametrize(
    "own",
    [{"advantage": "rloo", "advantage_eps": 0.1}, {"policy_loss": "gpg", "epsilon_low": 0.1}],
)
def test_the_choosers_own_option_is_refused(own):
    line = [f"algorithm.{name}={value}" for name, value in own.items()]
    for config in (load_grpo_config("preset:trl", line), GRPOConfig("o", algorithm=own).settings()):
        with pytest.raises(UserError, match="has no such option"):
            check_algorithm(config.algorithm)


def test_an_option_above_the_choice_is_refused():
    config = load_grpo_config("preset:rloo", ["algorithm.advantage_eps=0.1"])
    with pytest.raises(UserError, match="has no such option"):
        check_algorithm(config.algorithm)


def test_what_falls_away_from_a_file_of_the_users_is_said(tmp_path, caplog):
    file = tmp_path / "mine.yaml"
    file.write_text("base_config: preset:dapo\nalgorithm:\n  advantage_eps: 0.5\n")
    with caplog.at_level(logging.WARNING):
        load_grpo_config(file, ["algorithm.advantage=rloo"])
        load_grpo_config("preset:trl", ["algorithm.advantage=rloo"])
    (line,) = caplog.messages
    assert line.startswith(f"{file}:3: algorithm.advantage_eps has no effect with algorithm.advantage rloo")


def test_no_reference_and_no_adapters_take_their_settings_along(tmp_path):
    assert not chosen("preset:rloo", beta=0).kl_in_reward
    (tmp_path / "a.yaml").write_text("lora: {rank: 8, alpha: 5, dropout: 0.1}\n")
    lora = load_grpo_config(tmp_path / "a.yaml", ["lora.rank=0"]).lora
    check_lora(lora)
    assert not lora.enabled
    with pytest.raises(UserError, match="rank 0 means that there are no adapters"):
        check_lora(load_grpo_config(None, ["lora.rank=0", "lora.alpha=5"]).lora)


def test_a_kl_term_that_needs_no_correction_loses_the_preset_s():
    assert chosen("preset:trl").kl_bias_correction
    assert not chosen("preset:trl", kl_in_reward=True, beta=0.1).kl_bias_correction
    assert not chosen("preset:trl", kl_estimator="k3+").kl_bias_correction
    with pytest.raises(UserError, match="has an unbiased gradient; leave kl_bias_correction out"):
        chosen("preset:grpo", kl_estimator="k3+", kl_bias_correction=True)
