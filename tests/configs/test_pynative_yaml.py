"""YAMLs of MindFormers' PyNative trainer are read as those before: layout, model, adapters, recomputation."""

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

from mindrlhf.configs.model_defaults import open_model_yaml
from mindrlhf.configs.model_yaml import OPTIMIZER_LEVEL, ModelYaml, load_model_yaml
from mindrlhf.configs.pynative_yaml import OWN, UNUSED
from mindrlhf.errors import UserError

FILE = {
    "training": {"steps": 10, "local_batch_size": 1, "global_batch_size": 8},
    "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-5},
    "parallelism": {
        "data_parallel_shard": -1,
        "data_parallel_shard_strategy": "optim_grads_params",
        "disable_gradient_division": True,
        "tensor_parallel": 2,
        "context_parallel": 1,
        "pipeline_parallel": 1,
        "pipeline_parallel_layers_per_stage": None,
        "expert_parallel": 1,
        "sequence_parallel": True,
    },
    "model": {
        "model_type": "qwen3",
        "architectures": "Qwen3ForCausalLM",
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "qk_layernorm": True,
        "params_dtype": "float32",
        "compute_dtype": "bfloat16",
        "position_embedding_type": "rope",
    },
    "context": {"mode": 1, "device_target": "CPU"},
    "recompute": {"mode": "full", "full_recompute_layer": ["0-1"]},
}


@pytest.fixture
def read(tmp_path):
    def read(changes=None, *overrides: str, workers: int = 8) -> ModelYaml:
        content = {name: {**group, **(changes or {}).get(name, {})} for name, group in FILE.items()}
        content |= {name: group for name, group in (changes or {}).items() if name not in FILE}
        (tmp_path / "qwen3.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return open_model_yaml("train", str(tmp_path / "qwen3.yaml"), "CPU", workers, 1, overrides)

    return read


def test_layout_model_and_recomputation_are_read(read):
    found = read()
    parallel = found.parallel
    assert (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage, parallel.workers) == (4, 2, 1, 8)
    assert parallel.use_seq_parallel
    assert parallel.shards_weights
    model = found.architecture()
    assert (model.family, model.num_layers, model.num_heads, model.num_kv_heads) == ("qwen3", 2, 4, 2)
    assert (model.head_dim, model.rope_theta, model.qk_norm) == (16, 1e6, True)
    assert found.model.compute_dtype == "bfloat16"
    assert found.recompute.recompute is True
    assert found.context.mode == 0
    assert set(found.unused) == {
        "parallelism.disable_gradient_division",
        "model.model_config.architectures",
        "training",
        "lr_scheduler",
    }


@pytest.mark.parametrize(
    ("strategy", "stages", "level"),
    [
        ("optim_grads_params", 1, "level3"),
        ("optim_grads", 1, "level3"),
        ("optim", 1, "level1"),
        ("optim_grads_params", 2, "level1"),  # stages keep their weights
    ],
)
def test_what_replicas_share(read, strategy, stages, level):
    found = read({"parallelism": {"data_parallel_shard_strategy": strategy, "pipeline_parallel": stages}}).parallel
    assert (found.enable_parallel_optimizer, found.optimizer_level) == (True, level)
    assert (found.data_parallel, found.micro_batch_num) == (4 // stages, 4 if stages > 1 else 1)


@pytest.mark.parametrize(
    ("size", "level", "shared", "found"),
    [(1, "Level3", False, "level1"), (2, "Level1", True, "level1"), (2, "Level3", True, "level3")],
)
def test_what_replicas_share_in_the_form_of_1_9(tmp_path, size, level, shared, found):
    group = {"tensor_parallel": 1, "hsdp_shard_size": size, "hsdp_optimizer_level": level, "hsdp_threshold": 64}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({**FILE, "parallelism": group}))
    read = load_model_yaml(tmp_path / "train.yaml")
    assert (read.parallel.enable_parallel_optimizer, read.parallel.optimizer_level) == (shared, found)
    assert "parallelism.hsdp_threshold" in read.unused


def test_the_strategy_is_the_default_s_where_none_is_given(tmp_path):
    content = {**FILE, "parallelism": {"tensor_parallel": 1, "sequence_parallel": True}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(content))
    found = load_model_yaml(tmp_path / "train.yaml").parallel
    assert found.optimizer_level == "level3"
    assert not found.use_seq_parallel  # nothing to split


def test_one_file_serves_generation_too(read):
    assert not read().generating.parallel.shards_weights


def test_settings_in_the_first_form_win(read):
    found = read(None, f"{OPTIMIZER_LEVEL}=level1", "parallel_config.model_parallel=4", "parallelism.expert_parallel=1")
    assert (found.parallel.optimizer_level, found.parallel.model_parallel) == ("level1", 4)
    assert found.parallel.data_parallel == 2


def test_settings_in_the_file_s_own_form(read):
    found = read(None, "parallelism.tensor_parallel=1", "model.num_hidden_layers=5", "recompute.mode=None")
    assert (found.parallel.model_parallel, found.model.num_layers, found.recompute.recompute) == (1, 5, False)


def test_a_degree_of_sharding_changes_no_number(read):
    found = read({"parallelism": {"data_parallel_shard": 2}})
    assert "parallelism.data_parallel_shard" in found.unused
    assert found.parallel.data_parallel == 4


@pytest.mark.parametrize(
    ("pattern", "modules"),
    [
        (".*linear_qkv|.*linear_proj", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        (r".*mlp\.linear_fc1", ["gate_proj", "up_proj"]),
        (".*wq|.*w2", ["q_proj", "down_proj"]),
    ],
)
def test_adapters(read, pattern, modules):
    found = read({"lora_config": {"target_modules": pattern, "lora_rank": 4, "lora_a_std": 0.01}})
    assert found.lora.settings() == {"rank": 4, "alpha": 16.0, "dropout": 0.0, "target_modules": modules}
    assert "lora_config.lora_a_std" in found.unused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"parallelism": {"tensor_parralel": 2}},
            "unknown key parallelism.tensor_parralel; did you mean parallelism.ten",
        ),
        ({"parallelism": {"data_parallel_shard_strategy": "all"}}, "is 'all', and must be one of optim_grads_params, "),
        (
            {"parallelism": {"pipeline_parallel_layers_per_stage": [[0], [1]]}},
            "is [[0], [1]], which this suite does not",
        ),
        ({"parallelism": {"context_parallel": 2}}, "parallel_config.context_parallel is 2, and must be 1."),
        (
            {"model": {"model_type": "deepseek_v3"}},
            "model_type is 'deepseek_v3', and this model family is not supported",
        ),
        ({"model": {"num_hiden_layers": 2}}, "unknown key model.model_config.num_hiden_layers"),
    ],
)
def test_refusals_name_file_line_and_key(read, tmp_path, changes, words):
    with pytest.raises(UserError) as caught:
        read(changes)
    assert words in str(caught.value)
    (group,) = changes
    (key,) = changes[group]
    lines = (tmp_path / "qwen3.yaml").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.strip().startswith(f"{key}:"))
    assert str(caught.value).startswith(f"{tmp_path}/qwen3.yaml:{line}: ")


def test_a_group_that_is_none(tmp_path):
    (tmp_path / "train.yaml").write_text("parallelism: 3\nmodel: {hidden_size: 4}\n")
    with pytest.raises(UserError, match=r"train.yaml:1: parallelism is 3, and must be a group of keys"):
        load_model_yaml(tmp_path / "train.yaml")


def test_every_key_of_mindformers_is_known():
    found = importlib.util.find_spec("mindformers")
    file = Path(found.origin).parent / "pynative/config/config.py" if found and found.origin else Path("none")
    if not file.is_file():
        pytest.skip("MindFormers is not installed")
    own = re.search(r"class ParallelismConfig.*?(?=\n@dataclass)", file.read_text(), re.DOTALL)[0]
    keys = set(re.findall(r"^    (\w+): ", own, re.MULTILINE))
    assert len(keys) > 10
    assert keys <= {*OWN, *UNUSED}
