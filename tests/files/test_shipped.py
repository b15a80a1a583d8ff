"""Files that come with the package, by name and by path."""

from pathlib import Path

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.errors import UserError
from mindrlhf.files.shipped import names_yaml, shipped_file, shipped_yamls
from mindrlhf.user_functions import load_function


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A working directory without the project's files."""
    monkeypatch.chdir(tmp_path)


def test_every_file_has_a_name(root):
    files = [*root.glob("model_configs/*/*.yaml"), *root.glob("examples/recipes/*.yaml")]
    assert set(files) < set(shipped_yamls().values())
    assert {"finetune_qwen2_5_7b", "recipe:gsm8k_lora", "preset:dapo"} <= shipped_yamls().keys()
    assert names_yaml("finetune_qwen2_5_7b")
    assert not names_yaml("strategy.ckpt")


@pytest.mark.parametrize("name", ["finetune_qwen2_5_7b", "model_configs/qwen_grpo/finetune_qwen2_5_7b.yaml"])
def test_a_model_yaml_is_found_from_another_folder(name):
    assert load_model_yaml(name).parallel.model_parallel == 4
    assert load_model_yaml(f"{name}_cpu".replace(".yaml_cpu", "_cpu.yaml")).parallel.model_parallel == 1


def test_a_recipe_is_found_with_its_reward():
    assert load_grpo_config("recipe:gsm8k_lora").lora.rank == 16
    (reward,) = load_grpo_config("recipe:retool").reward.functions
    assert load_function("reward", reward.name).__name__ == "retool"


def test_a_file_of_ones_own_goes_first(tmp_path):
    (tmp_path / "finetune_qwen2_5_7b").write_text("parallel_config: {data_parallel: 3}\n")
    assert load_model_yaml("finetune_qwen2_5_7b").parallel.data_parallel == 3
    own = tmp_path / "examples" / "recipes" / "gsm8k.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("seed: 7\n")
    assert load_grpo_config("examples/recipes/gsm8k.yaml").seed == 7


def test_other_missing_files_stay_missing(tmp_path):
    assert shipped_file(Path("setup.py")) == Path("setup.py")
    assert shipped_file(Path("examples/none.yaml")) == Path("examples/none.yaml")
    with pytest.raises(UserError, match=r"^none\.yaml: there is no such file"):
        load_model_yaml("none.yaml")
    with pytest.raises(UserError, match=r"^Unknown YAML 'qwen2_5_7b': .*finetune_qwen2_5_7b"):
        load_model_yaml("qwen2_5_7b")
