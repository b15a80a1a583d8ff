"""How a model YAML and a checkpoint's configuration make one architecture, and what is refused."""

import pytest
import yaml

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
HF = ModelConfig(
    vocab_size=100,
    hidden_size=64,
    intermediate_size=176,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(9,),
)


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


@pytest.mark.parametrize(
    "key",
    ["vocab_size", "hidden_size", "num_layers", "num_heads", "rms_norm_eps", "theta"],
)
def test_without_a_checkpoint_what_is_needed_must_be_there(write, key):
    path = write(model_yaml(**{key: None}))
    message = refused(load_model_yaml(path).architecture)
    assert message.startswith(f"{path}: model.model_config lacks {key};")
    assert "config.json" in message


def test_what_the_yaml_leaves_out_comes_from_the_checkpoint(write):
    assert load_model_yaml(write({"parallel_config": {"data_parallel": 2}})).architecture(HF) == HF
    assert load_model_yaml(write(model_yaml())).architecture(HF) == HF


@pytest.mark.parametrize(
    ("key", "value", "theirs"),
    [
        ("hidden_size", 128, 64),
        ("vocab_size", 101, 100),
        ("intermediate_size", 192, 176),
        ("num_layers", 3, 2),
        ("num_heads", 8, 4),
        ("n_kv_heads", 4, 2),
        ("head_dim", 32, 16),
        ("rms_norm_eps", 1e-5, 1e-06),
        ("theta", 10000.0, 1000000.0),
        ("tie_word_embeddings", False, True),
        ("qkv_has_bias", False, True),
    ],
)
def test_what_the_yaml_says_must_agree_with_the_checkpoint(write, key, value, theirs):
    path = write(model_yaml(**{key: value}))
    message = refused(load_model_yaml(path).architecture, HF, "out/config.json")
    assert message == (
        f"{path}: model.model_config is not that of the checkpoint (out/config.json): {key} is {value} (the checkpoint "
        f"has {theirs}); set these keys to the checkpoint's values, or remove them."
    )


def test_all_keys_that_differ_are_listed_at_once(write):
    path = write(model_yaml(hidden_size=128, num_layers=3, rms_norm_eps=1e-5, type="Qwen3Config"))
    message = refused(load_model_yaml(path).architecture, HF)
    assert message.count("(the checkpoint has ") == 4
    for text in (
        "hidden_size is 128 (the checkpoint has 64), num_layers is 3 (the checkpoint has 2)",
        "rms_norm_eps is 1e-05 (the checkpoint has 1e-06), model family is qwen3 (the checkpoint has qwen2);",
    ):
        assert text in message


def test_a_yaml_of_another_family_than_the_checkpoint_is_refused(write):
    path = write({"model": {"model_config": {"type": "Qwen3Config"}}})
    message = refused(load_model_yaml(path).architecture, HF)
    assert "model family is qwen3 (the checkpoint has qwen2)" in message


def test_token_ids_are_the_yamls_and_the_smaller_length_holds(write):
    model = load_model_yaml(
        write(model_yaml(eos_token_id=[1, 2], pad_token_id=3, max_position_embedding=4096))
    ).architecture(HF)
    assert (model.eos_token_ids, model.pad_token_id, model.max_position_embeddings) == ((1, 2), 3, 512)
    assert (
        load_model_yaml(write(model_yaml(max_position_embedding=128))).architecture(HF).max_position_embeddings == 128
    )


@pytest.mark.parametrize(
    ("changes", "width"),
    [
        ({}, 11008),  # Llama-2 7B: hidden 4096
        ({"multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 16384),
        ({"multiple_of": 1}, 10922),
    ],
)
def test_an_absent_feed_forward_width_follows_mindformers_rule(write, changes, width):
    loaded = load_model_yaml(write(model_yaml(hidden_size=4096, num_heads=32, intermediate_size=None, **changes)))
    assert loaded.architecture().intermediate_size == width


def test_the_rule_is_what_llama_70b_was_published_with(write):
    changes = {"hidden_size": 8192, "num_heads": 64, "ffn_dim_multiplier": 1.3, "intermediate_size": None}
    assert load_model_yaml(write(model_yaml(multiple_of=4096, **changes))).architecture().intermediate_size == 28672


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_heads 4; set hidden_size to a multiple of 4"),
        ({"n_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"type": "Qwen2Config", "qkv_has_bias": False}, "qkv_has_bias is False, and a qwen2 model has True"),
        ({"qk_norm": True, "head_dim": 16}, "qkv_has_bias is True, and a qwen3 model has False"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(write, changes, words):
    path = write(model_yaml(**changes))
    message = refused(load_model_yaml(path).architecture)
    assert message.startswith(f"{path}: model.model_config")
    assert words in message


SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"extend_method": "LLAMA3", "scaling_factor": SCALING},  # MindFormers' keys
        {"rope_scaling": {"rope_type": "llama3", **SCALING}},  # HF's
    ],
)
def test_the_scaling_of_llama_3_comes_from_the_yaml_or_agrees_with_the_checkpoint(write, changes):
    path = write(model_yaml(**changes))
    model = load_model_yaml(path).architecture()
    assert model.rope_scaling.model_dump() == SCALING
    scaled = HF.model_copy(update={"rope_scaling": model.rope_scaling})
    assert load_model_yaml(path).architecture(scaled) == scaled
    assert load_model_yaml(write(model_yaml())).architecture(scaled) == scaled
    message = refused(load_model_yaml(write(model_yaml(**changes))).architecture, HF)
    assert "scaling_factor is " in message
    assert "(the checkpoint has None)" in message


def test_a_bare_scaling_factor_scales_nothing(write):
    loaded = load_model_yaml(write(model_yaml(extend_method="None", scaling_factor=1.0)))
    assert loaded.architecture().rope_scaling is None


@pytest.mark.parametrize("names", [{}, {"type": None, "model_type": "llama"}])
@pytest.mark.parametrize("bias", [None, False])
def test_a_llama_class_without_biases_is_a_llama(write, names, bias):
    """MindFormers writes Qwen2 under the same class, with biases."""
    model = load_model_yaml(write(model_yaml(qkv_has_bias=bias, **names))).architecture()
    assert (model.family, model.attention_bias, model.qk_norm, model.head_dim) == ("llama", False, False, 16)
    assert load_model_yaml(write(model_yaml(**names))).architecture().family == "qwen2"


def test_a_llama_yaml_beside_its_checkpoint(write):
    llama = HF.model_copy(update={"family": "llama", "attention_bias": False})
    assert load_model_yaml(write(model_yaml(qkv_has_bias=None))).architecture(llama) == llama
    message = refused(load_model_yaml(write(model_yaml())).architecture, llama)
    assert "(config.json): qkv_has_bias is True (the checkpoint has False)" in message
    message = refused(load_model_yaml(write(model_yaml(type="Qwen2Config", qkv_has_bias=None))).architecture, llama)
    assert "model family is qwen2 (the checkpoint has llama)" in message
