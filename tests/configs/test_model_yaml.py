"""MindFormers model YAMLs: what is read, what is listed as unused, what is refused, and how it meets a checkpoint."""

import pytest
import yaml

from mindrlhf.configs.loading import load_grpo_config, load_sft_config
from mindrlhf.configs.lora import Adapter
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.errors import UserError

SHAPE = {
    "type": "LlamaConfig",
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 100,
    "intermediate_size": 176,
    "qkv_has_bias": True,
    "rms_norm_eps": 1.0e-6,
    "theta": 1000000.0,
    "tie_word_embeddings": True,
}
# The groups of a MindFormers fine-tuning YAML, as its users have them.
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FULL = """
seed: 42
run_mode: 'finetune'
runner_config: {epochs: 2}
train_dataset: &train_dataset
  data_loader: {type: MindDataset}
train_dataset_task:
  dataset_config: *train_dataset
optimizer:
  betas: [0.9, 0.95]
  eps: 1.e-8
parallel:
  parallel_mode: 1
  full_batch: True
  enable_parallel_optimizer: True
parallel_config:
  data_parallel: 2
  model_parallel: 4
  pipeline_stage: 2
  context_parallel: 1
  use_seq_parallel: True
  optimizer_shard: True
  micro_batch_num: 16
  vocab_emb_dp: False
  gradient_aggregation_group: 8
micro_batch_interleave_num: 2
recompute_config:
  recompute: [7, 7]
  select_recompute: {'feed_forward\\.mul': [14, 14]}
  mp_comm_recompute: False
callbacks:
  - type: MFLossMonitor
context:
  mode: 0
  device_target: "Ascend"
  max_call_depth: 10000
  max_device_memory: "58.5GB"
  device_id: 0
  jit_config: {jit_level: "O1", infer_boost: "on"}
model:
  model_config:
    type: LlamaConfig
    batch_size: 1
    seq_length: 8192
    hidden_size: 3584
    num_layers: 28
    num_heads: 28
    n_kv_heads: 4
    vocab_size: 152064
    intermediate_size: 18944
    qkv_has_bias: True
    rms_norm_eps: 1.0e-6
    theta: 1000000.0
    max_position_embedding: 131072
    eos_token_id: 151643
    compute_dtype: "bfloat16"
    param_init_type: "float32"
    softmax_compute_type: "float16"
    use_flash_attention: True
    extend_method: "None"
    offset: [-1, 1]
    max_decode_length: 1024
    top_k: 0
    top_p: 0.8
    do_sample: False
  arch:
    type: LlamaForCausalLM
"""


@pytest.fixture
def write(tmp_path):
    def write(content, name="model.yaml"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return path

    return write


def model_yaml(**changes):
    """A complete small YAML with some keys of model_config changed; None removes a key."""
    values = {**SHAPE, **changes}
    return {"model": {"model_config": {key: value for key, value in values.items() if value is not None}}}


def refused(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_group_is_read_and_the_rest_listed(write):
    loaded = load_model_yaml(write(FULL))
    parallel = loaded.parallel
    assert (parallel.data_parallel, parallel.model_parallel, parallel.pipeline_stage, parallel.workers) == (2, 4, 2, 16)
    assert (parallel.use_seq_parallel, parallel.micro_batch_num, parallel.vocab_emb_dp) == (True, 16, False)
    assert parallel.gradient_aggregation_group == 8
    assert parallel.enable_parallel_optimizer is True
    assert loaded.recompute.recompute == (7, 7)
    context = loaded.context
    assert (context.device_target, context.max_device_memory, context.jit_level) == ("Ascend", "58.5GB", "O1")
    assert (loaded.model.compute_dtype, loaded.model.softmax_compute_type) == ("bfloat16", "float16")
    assert loaded.model.offset == (-1, 1)
    assert set(loaded.unused) == {
        "seed",
        "run_mode",
        "runner_config",
        "train_dataset",
        "train_dataset_task",
        "optimizer",
        "callbacks",
        "micro_batch_interleave_num",
        "parallel.parallel_mode",
        "parallel.full_batch",
        "parallel_config.optimizer_shard",
        "recompute_config.select_recompute",
        "recompute_config.mp_comm_recompute",
        "context.max_call_depth",
        "context.jit_config.infer_boost",
        "model.model_config.batch_size",
        "model.model_config.use_flash_attention",
        "model.arch",
    }
    assert len(set(loaded.unused)) == len(loaded.unused)


def test_the_architecture_of_a_yaml_alone(write):
    assert load_model_yaml(write(FULL)).architecture() == ModelConfig(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=131072,
        eos_token_ids=(151643,),
    )


def test_hf_spellings_and_qwen3(write):
    content = {
        "model": {
            "model_config": {
                "model_type": "qwen3",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 64,
                "head_dim": 32,
                "intermediate_size": 176,
                "vocab_size": 100,
                "rope_theta": 1000000.0,
                "rms_norm_eps": 1e-6,
                "max_position_embeddings": 64,
                "attention_bias": False,
                "qk_layernorm": True,
                "hidden_act": "swiglu",
                "params_dtype": "float32",
            }
        }
    }
    loaded = load_model_yaml(write(content))
    model = loaded.architecture()
    assert (model.family, model.num_layers, model.num_heads, model.num_kv_heads) == ("qwen3", 2, 4, 2)
    assert (model.attention_bias, model.qk_norm, model.head_dim, model.max_position_embeddings) == (False, True, 32, 64)
    assert loaded.unused == ()


PET = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ".*wq|.*w2"}


@pytest.mark.parametrize(
    ("group", "content", "message"),
    [
        ("", {"paralel_config": {}, **model_yaml()}, ":1: unknown group paralel_config; did you mean parallel_config?"),
        ("", {"model": {"model_confg": {}}}, ":2: unknown key model.model_confg; did you mean model.model_config?"),
        ("", {"model": {"model_config": 3}}, ":2: model.model_config is 3, and must be a group of keys."),
        ("", {"seed": 1}, ": none of the groups model, parallel_config, recompute_config, context is in it; give a"),
        ("model.model_config", {"hiden_size": 1}, "unknown key {group}.hiden_size; did you mean {group}.hidden_size?"),
        ("model.model_config", {"use_flash_atention": 1}, "did you mean {group}.use_flash_attention?"),
        ("model.model_config", {"hidden_size": "big"}, "{group}.hidden_size is 'big', and must be a whole number"),
        (
            "model.model_config",
            {"num_hidden_layers": 0},
            "{group}.num_hidden_layers is 0, and must be a whole number, at",
        ),
        (
            "model.model_config",
            {"num_layers": 2, "num_hidden_layers": 3},
            "another name of the same setting, is 2; keep",
        ),
        (
            "model.model_config",
            {"compute_dtype": "fp16"},
            "is 'fp16', and must be one of 'float32', 'float16', 'bfloat16', 'auto'.",
        ),
        (
            "model.model_config",
            {"type": "GLMConfig"},
            "{group}.type is 'GLMConfig', and this model family is not supported",
        ),
        ("model.model_config", {"extend_method": "NTK"}, "is 'NTK', and must be one of 'None', 'LLAMA3'."),
        ("model.model_config", {"extend_method": "LLAMA3"}, "scaling_factor with factor, low_freq_factor, high_"),
        (
            "model.model_config",
            {"scaling_factor": LLAMA3 | {"factor": 0.5}},
            "{group}.scaling_factor.factor is 0.5, and must be a number, at least 1.",
        ),
        ("model.model_config", {"pet_config": {"pet_type": "lora"}}, "pet_config.target_modules is missing, and"),
        ("model.model_config", {"pet_config": PET | {"pet_type": "ptuning2"}}, "must be 'lora'."),
        (
            "model.model_config",
            {"pet_config": PET | {"target_modules": ".*dense"}},
            "'.*dense' matches none of attention.",
        ),
        (
            "model.model_config",
            {"pet_config": PET | {"freeze_include": ["*"]}},
            "unknown key model.model_config.pet_config.",
        ),
        ("model.model_config", {"eos_token_id": "x"}, "must be a whole number or a list (each entry a whole number)."),
        (
            "parallel_config",
            {"data_paralel": 2},
            "unknown key {group}.data_paralel; did you mean {group}.data_parallel?",
        ),
        ("parallel_config", {"context_parallel": 2}, "{group}.context_parallel is 2, and must be 1."),
        (
            "parallel_config",
            {"expert_parallel": 0},
            "{group}.expert_parallel is 0, and must be a whole number, at least 1.",
        ),
        (
            "parallel_config",
            {"model_parallel": 0},
            "{group}.model_parallel is 0, and must be a whole number, at least 1.",
        ),
        ("recompute_config", {"recompute": "all"}, "{group}.recompute is 'all', and must be True or False or a whole"),
        ("recompute_config", {"recomput": True}, "unknown key {group}.recomput; did you mean {group}.recompute?"),
        ("context", {"device_target": "GPU"}, "{group}.device_target is 'GPU', and must be one of 'CPU', 'Ascend'."),
        ("context", {"max_device_memory": "58"}, "{group}.max_device_memory is '58', and must be text like '58GB'."),
        (
            "context",
            {"jit_config": {"jit_level": "O3"}},
            "{group}.jit_config.jit_level is 'O3', and must be one of 'O0'",
        ),
        ("context", {"devise_id": 0}, "unknown key {group}.devise_id; did you mean {group}.device_id?"),
        (
            "parallel",
            {"enable_parallel_optimizer": 2},
            "{group}.enable_parallel_optimizer is 2, and must be True or False.",
        ),
    ],
)
def test_a_mistake_in_our_groups_is_named_by_file_line_key_and_fix(write, group, content, message):
    for part in reversed(group.split(".") if group else ()):
        content = {part: content}
    if group == "parallel":
        content = {**model_yaml(), **content}
    path = write(content)
    found = refused(load_model_yaml, path)
    assert found.startswith(f"{path}:")
    assert message.format(group=group) in found


def test_the_line_of_a_mistake_is_that_of_the_key(write):
    path = write("context:\n  mode: 0\n  device_target: GPU\n")
    assert refused(load_model_yaml, path).startswith(f"{path}:3: context.device_target is 'GPU'")


def test_an_overlay_overrides_key_by_key_and_mistakes_are_found_in_the_base(write):
    base = write(FULL, "base.yaml")
    top = write(
        'base_config: base.yaml\ncontext:\n  device_target: "CPU"\nmodel:\n  model_config:\n    num_layers: 3\n'
    )
    loaded = load_model_yaml(top)
    assert (loaded.context.device_target, loaded.context.jit_level) == ("CPU", "O1")
    assert (loaded.model.num_layers, loaded.model.hidden_size) == (3, 3584)
    base.write_text(FULL.replace("rms_norm_eps: 1.0e-6", "rms_norm_eps: -1.0"))
    line = FULL.splitlines().index("    rms_norm_eps: 1.0e-6") + 1
    assert refused(load_model_yaml, top).startswith(f"{base}:{line}: model.model_config.rms_norm_eps is -1.0")


def test_overrides_change_a_yaml(write):
    loaded = load_model_yaml(write(FULL), ["model.model_config.seq_length=64", "parallel_config.data_parallel=1"])
    assert (loaded.model.seq_length, loaded.parallel.workers) == (64, 8)
    assert refused(load_model_yaml, write(FULL), ["context.device=CPU"]).startswith("command line: unknown key context")


def test_sampling_keys_are_defaults_beneath_the_grpo_config(write, tmp_path):
    sampling = {"max_decode_length": 64, "min_decode_length": 2, "temperature": 1.2, "top_k": 50, "top_p": 0.9}
    loaded = load_model_yaml(write(model_yaml(**sampling, repetition_penalty=1.05, do_sample=True)))
    assert loaded.sampling_defaults() == {
        "rollout": {
            "max_new_tokens": 64,
            "min_new_tokens": 2,
            "temperature": 1.2,
            "top_k": 50,
            "top_p": 0.9,
            "repetition_penalty": 1.05,
        }
    }
    (tmp_path / "grpo.yaml").write_text("rollout:\n  temperature: 0.8\n")
    rollout = load_grpo_config(tmp_path / "grpo.yaml", ["rollout.top_k=5"], loaded.sampling_defaults()).rollout
    assert (rollout.temperature, rollout.top_k, rollout.top_p, rollout.max_new_tokens) == (0.8, 5, 0.9, 64)


def test_do_sample_false_is_greedy_and_no_sampling_key_is_no_default(write):
    loaded = load_model_yaml(write(model_yaml(do_sample=False, temperature=0.7)))
    assert loaded.sampling_defaults() == {"rollout": {"temperature": 0.0}}
    assert load_model_yaml(write(model_yaml())).sampling_defaults() == {}


def test_keys_that_are_set_for_another_device_or_for_training(tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(
        "context: {device_target: CPU, max_device_memory: 58GB}\n"
        "parallel_config: {data_parallel: 2, micro_batch_num: 4}\n"
        "recompute_config: {recompute: True}\n"
    )
    yaml = load_model_yaml(file)
    assert yaml.without_effect(generating=False) == ["context.max_device_memory"]
    generating = ["context.max_device_memory", "parallel_config.micro_batch_num", "recompute_config.recompute"]
    assert yaml.without_effect(generating=True) == generating
    file.write_text(file.read_text().replace("CPU", "Ascend"))
    assert load_model_yaml(file).without_effect(generating=False) == []


@pytest.mark.parametrize("group", ["pet_config", "lora_config"])
def test_adapters_of_mindformers_are_defaults_of_the_run(write, group):
    given = {"pet_config": PET | {"pet_type": "lora"}} if group == "pet_config" else {}
    content = model_yaml(**given)
    content |= {"lora_config": PET} if group == "lora_config" else {}
    loaded = load_model_yaml(write(content))
    assert not loaded.unused
    config = load_grpo_config(None, ["lora.alpha=32"], loaded.adapter_defaults())
    assert config.lora.adapter() == Adapter(4, 32, target_modules=("q_proj", "down_proj"))
    assert load_sft_config(None, (), loaded.adapter_defaults()).lora.alpha == 8
    assert load_model_yaml(write(model_yaml())).adapter_defaults() == {}


@pytest.mark.parametrize("pattern", [".*wq|.*w9", ".*query|.*wv", ".*wq|"])
def test_a_branch_of_mindformers_pattern_that_matches_nothing_is_refused(write, pattern):
    with pytest.raises(UserError, match=r"pet_config.target_modules: '.*' matches none of attention"):
        load_model_yaml(write(model_yaml(pet_config=PET | {"target_modules": pattern})))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", ["vocab_size", "rms_norm_eps", "theta", "unknown_key_of_mindformers", "offset"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, value, place):
    """By file, line and key, whatever the key means."""
    content = {"model": {"model_config": SHAPE | {place: value}}, "context": {"device_target": "CPU"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(content))
    found = rf"a\.yaml:\d+: model\.model_config\.{place} is not a finite number"
    with pytest.raises(UserError, match=found):
        load_model_yaml(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({"model": {"model_config": SHAPE}}))
    with pytest.raises(UserError, match=r"command line: parallel_config\.data_parallel is not a finite number"):
        load_model_yaml(tmp_path / "b.yaml", ["parallel_config.data_parallel=.nan"])
