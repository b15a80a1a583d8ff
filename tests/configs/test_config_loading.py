"""From files and overrides to typed settings: precedence, and one sentence for each kind of mistake."""

import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from mindrlhf.configs import grpo, model, model_settings, model_yaml, sft
from mindrlhf.configs.base import Settings
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.errors import UserError


def written(folder, text, name="grpo.yaml"):
    path = folder / name
    path.write_text(text)
    return path


def refused(text, folder, overrides=()):
    path = written(folder, text) if text else None
    with pytest.raises(UserError) as caught:
        load_grpo_config(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), "FILE")


def test_nothing_given_is_the_typed_defaults():
    assert load_grpo_config() == GRPOSettings()
    assert load_sft_config() == SFTSettings()


def test_precedence_is_defaults_predict_yaml_files_overrides(tmp_path):
    path = written(tmp_path, "rollout:\n  top_k: 7\n  top_p: 0.7\n")
    defaults = {"rollout": {"temperature": 0.5, "top_k": 5, "top_p": 0.5}}
    config = load_grpo_config(path, ["rollout.top_p=0.9", "optimizer.lr=1e-5"], defaults)
    rollout = config.rollout
    assert (rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p) == (0.5, 7, 0.9, 0.0)
    assert config.optimizer.lr == 1e-5
    assert config.optimizer.beta2 == 0.95


def test_a_base_config_is_overridden_key_by_key(tmp_path):
    written(tmp_path, "optimizer:\n  lr: 1e-4\n  beta1: 0.8\nseed: 3\n", "root.yaml")
    written(tmp_path, "base_config: root.yaml\noptimizer:\n  beta1: 0.7\n", "middle.yaml")
    config = load_grpo_config(written(tmp_path, "base_config: middle.yaml\nseed: 4\n"))
    assert (config.optimizer.lr, config.optimizer.beta1, config.seed) == (1e-4, 0.7, 4)


def test_overrides_reach_the_default_reward_function():
    config = load_grpo_config(
        overrides=["reward.functions.0.weight=2", "reward.functions.1={name: format, weight: 0.5}"]
    )
    assert [(one.name, one.weight) for one in config.reward.functions] == [("gsm8k", 2.0), ("format", 0.5)]
    config = load_grpo_config(overrides=["reward.functions.0.args.strict=true", "rollout.stop_strings=['</a>', 'Q:']"])
    assert config.reward.functions[0].args == {"strict": True}
    assert config.rollout.stop_strings == ("</a>", "Q:")


def test_optional_settings_take_null(tmp_path):
    path = written(tmp_path, "trainer:\n  total_steps: 5\n")
    assert load_grpo_config(path).trainer.total_steps == 5
    assert load_grpo_config(path, ["trainer.total_steps=null"]).trainer.total_steps is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimizer:\n  lrr: 1\n", "FILE:2: unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("optimiser:\n  lr: 1\n", "FILE:1: unknown key optimiser; did you mean optimizer?"),
        ("beta: 0.1\n", "FILE:1: unknown key beta; did you mean algorithm.beta?"),
        ("rollout:\n  beta: 0.1\n", "FILE:2: unknown key rollout.beta; did you mean algorithm.beta?"),
        ("critic:\n  xyz: 1\n", "FILE:2: unknown key critic.xyz; known here are optimizer, value_clip, warmup_steps."),
        (
            "reward:\n  functions:\n    - name: a\n      wieght: 1\n",
            "FILE:4: unknown key reward.functions.0.wieght; did you mean reward.functions.0.weight?",
        ),
        ("optimizer:\n  lr: fast\n", "FILE:2: optimizer.lr is 'fast', and must be a number, at least 0."),
        ("optimizer:\n  lr: true\n", "FILE:2: optimizer.lr is True, and must be a number, at least 0."),
        ("optimizer:\n  lr: .inf\n", "FILE:2: optimizer.lr is inf, and must be finite, a number, at least 0."),
        ("optimizer: 3\n", "FILE:1: optimizer is 3, and must be a group of keys."),
        (
            "optimizer:\n  beta1: 1\n",
            "FILE:2: optimizer.beta1 is 1, and must be a number, at least 0 and below 1.",
        ),
        (
            "optimizer:\n  lr_decay: step\n",
            "FILE:2: optimizer.lr_decay is 'step', and must be one of 'constant', 'linear', 'cosine'.",
        ),
        (
            "rollout:\n  num_generations: 2.5\n",
            "FILE:2: rollout.num_generations is 2.5, and must be a whole number, at least 1.",
        ),
        ("rollout:\n  top_p: 1.5\n", "FILE:2: rollout.top_p is 1.5, and must be a number, above 0 and at most 1."),
        (
            "rollout:\n  stop_strings: a\n",
            "FILE:2: rollout.stop_strings is 'a', and must be a list (each entry text, not empty).",
        ),
        ("rollout:\n  stop_strings: [1]\n", "FILE:2: rollout.stop_strings.0 is 1, and must be text, not empty."),
        ("trainer:\n  progress: 'no'\n", "FILE:2: trainer.progress is 'no', and must be True or False."),
        ("trainer:\n  total_steps: 0\n", "FILE:2: trainer.total_steps is 0, and must be a whole number, at least 1."),
        (
            "seed: 2024-01-01\n",
            f"FILE:1: seed is '2024-01-01', and must be a whole number, at least 0 and at most {2**62}.",
        ),
        ("algorithm:\n  advantage: 5\n", "FILE:2: algorithm.advantage is 5, and must be text."),
        (
            "reward:\n  functions:\n    - weight: 1\n",
            "FILE:3: reward.functions.0.name is missing, and must be text.",
        ),
    ],
)
def test_a_mistake_in_a_file_is_named_by_file_line_key_and_right_value(tmp_path, text, message):
    assert refused(text, tmp_path) == message


def test_a_mistake_in_a_base_is_named_in_that_file(tmp_path):
    base = written(tmp_path, "seed: 1\noptimizer:\n  lr: slow\n", "base.yaml")
    message = refused("base_config: base.yaml\nseed: 2\n", tmp_path)
    assert message.startswith(f"{base}:3: optimizer.lr is 'slow'")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=x", "command line: optimizer.lr is 'x', and must be a number, at least 0."),
        ("optimizer.lrr=1", "command line: unknown key optimizer.lrr; did you mean optimizer.lr?"),
        ("lr=1", "command line: unknown key lr; did you mean optimizer.lr?"),
        (
            "reward.functions.0.weight=heavy",
            "command line: reward.functions.0.weight is 'heavy', and must be a number.",
        ),
        (
            "reward.functions=5",
            "command line: reward.functions: 5 is no function; give a name, or a list of names and groups.",
        ),
        (
            "reward.functions=[gsm8k, 5]",
            "command line: reward.functions.1: 5 is no function; give a name, or a group like "
            "{name: format, weight: 0.5}.",
        ),
        ("optimizer=", "command line: optimizer is None, and must be a group of keys."),
    ],
)
def test_a_mistake_in_an_override_is_named_on_the_command_line(tmp_path, override, message):
    assert refused("optimizer:\n  lr: 1\n", tmp_path, [override]) == message


def test_a_long_value_is_cut_in_the_message(tmp_path):
    assert len(refused(f"seed: {'x' * 1000}\n", tmp_path)) < 200


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError):
        GRPOSettings().seed = 3


def test_sft_settings_load_from_yaml_with_the_shared_groups(tmp_path):
    path = written(tmp_path, "data:\n  pairs_per_step: 4\noptimizer:\n  warmup_steps: 2\n")
    config = load_sft_config(path, ["trainer.epochs=3"])
    assert (config.data.pairs_per_step, config.optimizer.warmup_steps, config.trainer.epochs) == (4, 2, 3)
    assert config.optimizer.lr == SFTSettings().optimizer.lr, "a group given in part keeps this run's own defaults"
    with pytest.raises(UserError, match=r"unknown key data.prompts_per_step; did you mean data\.pairs_per_step\?"):
        load_sft_config(overrides=["data.prompts_per_step=4"])


def test_every_setting_has_a_description_of_one_line():
    groups = {
        value
        for module in (grpo, model, model_settings, model_yaml, sft)
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Settings) and value is not Settings
    }
    assert len(groups) > 15
    for group in groups:
        assert group.__doc__, group
        for name, info in group.model_fields.items():
            text = info.description
            assert text, f"{group.__name__}.{name}"
            assert text.endswith("."), f"{group.__name__}.{name}: {text}"
            assert "\n" not in text


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=4), st.dates()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)
keys = st.sampled_from(
    [*GRPOSettings.model_fields, "lr", "functions", "top_p", "model_config", "context", "model", "x"]
)


@given(st.dictionaries(keys, st.one_of(values, st.dictionaries(keys, values, max_size=3)), max_size=3))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_whatever_a_file_holds_it_loads_or_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "any.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    messages = []
    for load in (load_grpo_config, load_sft_config, load_model_yaml):
        try:
            load(path)
        except UserError as error:
            messages.append(str(error))
    assert all(message.startswith(str(path)) and "\n" not in message for message in messages)


@pytest.mark.parametrize("text", ["0100", "090", "1_00", "1:30", "1:30:00"])
def test_every_reader_takes_a_number_as_meant_or_refuses_it(tmp_path, text):
    """YAML 1.1 has 64 (octal), 90 and 5400 (base 60) here."""
    grpo, model = tmp_path / "grpo.yaml", tmp_path / "model.yaml"
    grpo.write_text(f"rollout:\n  max_new_tokens: {text}\n")
    model.write_text(f"model:\n  model_config:\n    seq_length: {text}\n")
    for read in (
        lambda: load_grpo_config(None, [f"rollout.max_new_tokens={text}"]).rollout.max_new_tokens,
        lambda: load_grpo_config(grpo).rollout.max_new_tokens,
        lambda: load_model_yaml(model).model.seq_length,
    ):
        if ":" in text:
            with pytest.raises(UserError, match=f"is '{text}', and must be a whole number"):
                read()
        else:
            assert read() == int(text)


# Settings that no graph takes: seconds and GiB.
ON_THE_HOST = (
    "reward.timeout_s",
    "rollout.tool_timeout_s",
    "trainer.max_host_memory_gb",
    "trainer.rank_timeout_s",
)


def numbers(group, prefix=""):
    """Dotted names of all settings that are numbers with a fraction."""
    for name, field in group.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from numbers(field.annotation, f"{prefix}{name}.")
        elif field.annotation is float or re.search(r"\bfloat\b", str(field.annotation)):
            yield prefix + name


@pytest.mark.parametrize(("load", "config"), [(load_grpo_config, GRPOSettings), (load_sft_config, SFTSettings)])
def test_numbers_of_graphs_are_within_float32(load, config):
    names = [name for name in numbers(config) if name not in ON_THE_HOST]
    assert len(names) > 6
    for name in names:
        for value in ("1e39", "1e-45", "-1e39"):
            with pytest.raises(UserError, match=rf"command line: {name}.*(float32|must be a number)"):
                load(None, [f"{name}={value}"])
    with pytest.raises(UserError, match=r"optimizer.lr: 1e\+39 is beyond float32, which .*; give at most 3.40e\+38 in"):
        load(None, ["optimizer.lr=1e39"])
    assert load(None, ["optimizer.lr=1e-37"]).optimizer.lr == 1e-37


def test_the_weight_of_a_reward_is_within_float32():
    with pytest.raises(UserError, match=r"reward.functions.*weight: -1e\+39 is beyond float32"):
        load_grpo_config(None, ["reward.functions=[{name: gsm8k, weight: -1e39}]"])
