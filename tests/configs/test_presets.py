"""The shipped presets: each is a runnable algorithm, and names verl's and TRL's key beside each of its own."""

import re

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_settings import ModelSettings
from mindrlhf.configs.model_yaml import ContextSettings, ModelYaml, ParallelSettings
from mindrlhf.configs.validate import check_grpo
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import shipped_yamls

MODEL = ModelConfig(
    vocab_size=96, hidden_size=96, intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=24
)
YAML = ModelYaml(
    path="model.yaml",
    model=ModelSettings(),
    parallel=ParallelSettings(),
    context=ContextSettings(device_target="CPU"),
)
PRESETS = {name.removeprefix("preset:"): file for name, file in shipped_yamls().items() if name.startswith("preset:")}
EXPECTED = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "opo", "gpg"}
EXPECTED |= {"sapo", "gmpo", "ppo", "clip_cov", "kl_cov", "gdpo", "passk", "reinforce_plus_plus_baseline"}
EXPECTED |= {"trl"}  # TRL's defaults


def test_the_published_algorithms_are_there():
    assert set(PRESETS) == EXPECTED


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_passes_the_checks_of_a_run(name):
    config = load_grpo_config(f"preset:{name}")
    check_grpo(config, YAML, YAML, MODEL, MODEL, workers=1)
    assert config.algorithm.loss()


@pytest.mark.parametrize("name", PRESETS)
def test_every_key_of_a_preset_is_that_of_verl_and_trl_too(name):
    for line in PRESETS[name].read_text().splitlines():
        if re.match(r" +\w+: [^ ]", line):
            assert re.search(r"# .*verl.*TRL", line), line


def test_dapo_is_whole():
    config = load_grpo_config("preset:dapo", ["reward.functions=[{name: countdown}]", "reward.overlong_buffer=8"])
    assert (config.algorithm.epsilon_low, config.algorithm.epsilon_high) == (0.2, 0.28)
    assert config.algorithm.aggregation == "token-mean"
    assert config.dynamic_sampling.enabled
    functions = config.reward.all_functions
    assert [(one.name, one.weight, one.args) for one in functions] == [
        ("countdown", 1.0, {}),
        ("soft_overlong", 1.0, {"buffer": 8}),
    ]


def test_a_file_builds_on_a_preset(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base_config: preset:dapo\nalgorithm:\n  epsilon_high: 0.3\n")
    config = load_grpo_config(path, ["algorithm.epsilon_low=0.1"])
    assert (config.algorithm.epsilon_low, config.algorithm.epsilon_high) == (0.1, 0.3)
    assert config.algorithm.aggregation == "token-mean"


def test_an_unknown_preset_is_refused_by_its_nearest_name(tmp_path):
    with pytest.raises(
        UserError, match=r"^Unknown YAML 'preset:dappo': did you mean 'preset:dapo'\? Known are preset:"
    ):
        load_grpo_config("preset:dappo")
    (tmp_path / "mine.yaml").write_text("seed: 1\nbase_config: preset:grop\n")
    with pytest.raises(UserError, match=r"mine.yaml:2: base_config: Unknown YAML 'preset:grop': did you mean 'preset:"):
        load_grpo_config(tmp_path / "mine.yaml")
