"""Files of other model families are recognised and refused in one sentence that names the supported ones."""

import json

import pytest

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.errors import UserError

SUPPORTED = "is not supported; supported are Qwen2, Qwen2.5, Qwen3, Llama 3, Qwen3-MoE."
DENSE = "hidden_size: 4096, num_layers: 32, num_heads: 32, vocab_size: 32000, rms_norm_eps: 1.0e-5, theta: 10000.0"
YAMLS = {
    "mixtral": f"model_config: {{type: LlamaConfig, {DENSE}, moe_config: {{expert_num: 8, num_experts_chosen: 2}}}}",
    "glm": "model_config: {type: GLM32kConfig, num_layers: 40, padded_vocab_size: 151552, hidden_size: 4096}",
    "glm without a type": "model_config: {num_layers: 40, padded_vocab_size: 151552, ffn_hidden_size: 13696}",
    "deepseek": "model_config: {type: DeepseekV3Config, hidden_size: 7168, kv_lora_rank: 512, q_lora_rank: 1536}",
    "qwen2 moe": "model_config: {model_type: qwen2_moe, hidden_size: 2048, num_experts: 60}",
    "experts of a dense type": f"model_config: {{model_type: qwen3, {DENSE}, num_experts: 128}}",
    "shared experts": f"model_config: {{model_type: qwen3_moe, {DENSE}, n_shared_experts: 2}}",
    "experts beside a known type": f"model_config: {{type: Qwen3Config, {DENSE}, num_experts: 128}}",
    "a sign that is true or false": f"model_config: {{type: LlamaConfig, {DENSE}, multi_latent_attention: True}}",
    "pangu": "model_config: {type: PanguAlphaConfig, embedding_size: 2560}\n  arch: {type: PanguAlphaHeadModel}",
}


def refused(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_of_another_family(tmp_path, name):
    path = tmp_path / "model.yaml"
    path.write_text(f"model:\n  {YAMLS[name]}\nparallel_config: {{data_parallel: 1}}\n")
    message = refused(lambda: load_model_yaml(path).architecture())
    assert message.startswith(f"{path}")
    assert message.endswith(SUPPORTED)


def test_experts_outside_of_the_model_s_settings(tmp_path):
    """MindFormers' YAMLs have the group of experts at the top; one expert is a dense model."""
    path = tmp_path / "model.yaml"
    shape = f"model:\n  model_config: {{type: LlamaConfig, {DENSE}, qkv_has_bias: True}}\n"
    path.write_text(shape + "moe_config:\n  expert_num: 1\n")
    assert load_model_yaml(path).unused == ("moe_config",)
    path.write_text(shape + "moe_config:\n  expert_num: 8\n")
    message = f"{path}:3: moe_config is {{'expert_num': 8}}, and a mixture of experts {SUPPORTED}"
    assert refused(load_model_yaml, path) == message


def test_a_yaml_that_names_no_family_is_not_asked_for_biases(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(f"model:\n  model_config: {{{DENSE}}}\n")
    message = refused(load_model_yaml(path).architecture)
    assert "model.model_config lacks type" in message
    assert "qkv_has_bias" not in message


@pytest.mark.parametrize("family", ["llama4", "qwen2_moe", "glm4", "deepseek_v3", "mistral", None, 5])
def test_a_config_json_of_another_family(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "hidden_size": 64}))
    message = refused(read_hf_config, tmp_path)
    assert message == f"{tmp_path / 'config.json'}: model_type is {family!r}, and this model family {SUPPORTED}"


GRPO = "rl_config:\n  beta: 0.01\nactor_config:\n  load: x\ngenerate_config:\n  use_vllm: 1\ncontext:\n  mode: 0\n"


def test_settings_of_grpo_are_no_model(tmp_path):
    path = tmp_path / "grpo_config.yaml"
    path.write_text(GRPO)
    message = refused(load_model_yaml, path)
    assert message.startswith(f"{path}:1: rl_config: this is MindRLHF's file of GRPO settings and no model YAML; give ")
    assert "actor_config.model_config" in message
    assert "generate_config.model_config" in message
    assert "--grpo_config" in message
    path.write_text("rollout:\n  num_generations: 4\n")
    assert "(GRPO settings go to --grpo_config)" in refused(load_model_yaml, path)


WRONG = [-0.5, 10**30, "x", True, [], [None], [10**30], {}, {"a": -0.5}, None, "", [[]], 0, -1, 1e308]
KEYS = (
    *("model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "rms_norm_eps", "rope_theta"),
    *("rope_scaling", "rope_parameters", "layer_types", "use_sliding_window", "hidden_act", "tie_word_embeddings"),
    *("max_position_embeddings", "initializer_range", "eos_token_id", "pad_token_id", "bos_token_id"),
)
GOOD = {
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_crafted_values_are_read_or_refused_in_a_sentence(tmp_path, file, key):
    for value in WRONG:
        (tmp_path / "config.json").write_text(json.dumps(GOOD))
        (tmp_path / file).write_text(json.dumps((GOOD if file == "config.json" else {}) | {key: value}))
        message = ""
        try:
            config = read_hf_config(tmp_path)
        except UserError as error:
            message = str(error)
        if message:
            assert message.startswith(str(tmp_path)), value
            assert "\n" not in message, value
        else:
            tokens = (*config.eos_token_ids, config.pad_token_id, config.bos_token_id)
            assert all(token is None or -1 <= token < 2**31 for token in tokens), value


def test_architectures_that_are_no_list(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GOOD | {"architectures": -0.5}))
    assert refused(read_hf_config, tmp_path).endswith("architectures is -0.5, and must be a list of names.")
