"""ModelConfig from HF config.json: both spellings of the rotary settings, defaults, and what is refused."""

import json

import pytest

from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError

SMALL = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def refused(changes, drop=()):
    raw = {key: value for key, value in {**SMALL, **changes}.items() if key not in drop}
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf(raw, "dir/config.json")
    message = str(caught.value)
    assert message.startswith("dir/config.json: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("rope", "theta"),
    [
        ({"rope_theta": 5e5}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 5e5),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5}, 5e5),
        ({}, 10000.0),
    ],
)
def test_both_spellings_of_the_rotary_base(rope, theta):
    assert ModelConfig.from_hf({**SMALL, **rope}, "config.json").rope_theta == theta


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    ],
)
def test_scaled_rotary_embeddings_are_refused(rope):
    message = refused(rope)
    assert "rotary scaling" in message
    assert "remove rope_scaling" in message


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_scaling_of_llama_3_is_read(key):
    config = ModelConfig.from_hf({**SMALL, "rope_theta": 5e5, key: LLAMA3}, "config.json")
    numbers = {name: value for name, value in LLAMA3.items() if name != "rope_type"}
    assert config.rope_scaling.model_dump() == numbers
    assert config.rope_theta == 5e5
    written = config.to_hf()
    assert written["rope_scaling"] == LLAMA3
    assert ModelConfig.from_hf(written, "config.json") == config
    assert "rope_scaling" not in ModelConfig.from_hf(SMALL, "config.json").to_hf()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factor": None}, "rope_parameters.factor is None, and must be a number, at least 1"),
        ({"factor": 0.5}, "rope_parameters.factor is 0.5, and must be a number, at least 1"),
        ({"high_freq_factor": 1.0}, "rope_parameters: high_freq_factor 1.0 must be above low_freq_factor"),
        ({"original_max_position_embeddings": 8.5}, "original_max_position_embeddings is 8.5, and must be a whole"),
    ],
)
def test_wrong_numbers_of_the_scaling_are_refused(changes, words):
    assert words in refused({"rope_parameters": LLAMA3 | changes})


def test_a_missing_number_of_the_scaling_is_named():
    rope = {key: value for key, value in LLAMA3.items() if key != "factor"}
    assert "rope_scaling.factor is missing, and must be a number, at least 1" in refused({"rope_scaling": rope})


def test_rotary_settings_that_are_no_object_are_refused():
    assert "rope_scaling is 'yarn', and must be an object or null" in refused({"rope_scaling": "yarn"})


@pytest.mark.parametrize(
    "window", [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}]
)
def test_sliding_windows_are_refused(window):
    assert "use_sliding_window true is not supported; set it to false" in refused(window)


def test_a_window_that_is_not_used_is_no_matter():
    unused = {"sliding_window": 4096, "use_sliding_window": False}
    assert ModelConfig.from_hf({**SMALL, **unused}, "config.json") == ModelConfig.from_hf(SMALL, "config.json")


def test_absent_keys_mean_what_transformers_takes_them_for():
    config = ModelConfig.from_hf({**SMALL, "num_key_value_heads": None, "eos_token_id": [3, 4]}, "config.json")
    assert (config.num_kv_heads, config.head_dim, config.attention_bias, config.qk_norm) == (4, 16, True, False)
    assert config.eos_token_ids == (3, 4)
    qwen3 = ModelConfig.from_hf({**SMALL, "model_type": "qwen3"}, "config.json")
    assert (qwen3.head_dim, qwen3.attention_bias, qwen3.qk_norm) == (128, False, True)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_defaults_are_those_of_transformers(family):
    configuration = pytest.importorskip(f"transformers.models.{family}.configuration_{family}")
    theirs = getattr(configuration, f"{family.capitalize()}Config")(**{**SMALL, "model_type": family})
    drop = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
    defaults = getattr(configuration, f"{family.capitalize()}Config")()
    raw = {key: value for key, value in SMALL.items() if key not in drop}
    ours = ModelConfig.from_hf({**raw, "model_type": family}, "config.json")
    assert ours.rms_norm_eps == defaults.rms_norm_eps
    assert ours.max_position_embeddings == defaults.max_position_embeddings
    assert ours.tie_word_embeddings == defaults.tie_word_embeddings
    assert ours.initializer_range == defaults.initializer_range
    assert ours.rope_theta == defaults.rope_theta
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == head_dim


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "gemma"},
            "model_type is 'gemma', and this model family is not supported; supported are Qwen2, Qwen2.5, Qwen3",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and must be 'silu'"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias true is not supported with qwen3"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias true is not supported with llama"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias true is not supported with llama; take one without"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, and must be a whole number, at least 1"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four', and must be a whole number, at least 1"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_heads 4; set hidden_size to a multiple of 4"),
        ({"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, and must be finite"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused_under_its_hf_key(changes, words):
    assert words in refused(changes)


def test_a_missing_key_is_named():
    assert "intermediate_size is missing, and must be a whole number, at least 1" in refused(
        {}, drop=["intermediate_size"]
    )


def test_a_file_that_holds_no_object_is_refused():
    with pytest.raises(UserError, match="must hold one JSON object"):
        ModelConfig.from_hf([], "config.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": 7},
        {"eos_token_id": [7, 8], "pad_token_id": 0},
        {"model_type": "qwen3", "head_dim": 32},
        {"model_type": "llama"},
        {"model_type": "qwen3_moe", "num_local_experts": 9, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ],
)
def test_writing_and_reading_again_gives_the_same_model(changes):
    config = ModelConfig.from_hf({**SMALL, **changes}, "config.json")
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())), "config.json") == config


EXPERTS = {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}


def test_experts_under_either_name():
    for names in ({"num_experts": 8}, {"num_local_experts": 8}, {"num_local_experts": 8, "num_experts": 8}):
        config = ModelConfig.from_hf({**SMALL, **EXPERTS, **names}, "config.json")
        assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (8, 2, 32)
        assert (config.norm_topk_prob, config.expert_layers, config.qk_norm) == (False, (0, 1), True)
    both = {"num_experts": 8, "num_local_experts": 4}
    assert "num_experts is 8 and num_local_experts is 4; leave one out" in refused({**EXPERTS, **both})


@pytest.mark.parametrize(
    ("changes", "layers", "widths"),
    [
        ({}, (0, 1, 2, 3, 4), {"moe_intermediate_size": 32}),
        ({"decoder_sparse_step": 2}, (1, 3), {"intermediate_size": 176, "moe_intermediate_size": 32}),
        ({"mlp_only_layers": [0, 4]}, (1, 2, 3), {"intermediate_size": 176, "moe_intermediate_size": 32}),
        ({"mlp_only_layers": [0, 1, 2, 3, 4]}, (), {"intermediate_size": 176}),
    ],
)
def test_layers_with_experts(changes, layers, widths):
    raw = {**SMALL, **EXPERTS, "num_experts": 8, "num_hidden_layers": 5, **changes}
    config = ModelConfig.from_hf(raw, "config.json")
    assert config.expert_layers == layers
    assert config.inner_widths == widths
    assert config.active_width == len(layers) * 64 + (5 - len(layers)) * 176


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9; set it to a number from 1 to num_experts 8"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0; set it to the width of one expert"),
        ({"num_experts": 0}, "num_experts is 0, and a model of the family qwen3_moe has some"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers"),
        ({"attention_bias": True}, "attention_bias true is not supported with qwen3_moe"),
    ],
)
def test_experts_that_cannot_be_are_refused(changes, words):
    assert words in refused({**EXPERTS, "num_experts": 8, **changes})


@pytest.mark.parametrize("name", ["qwen2_tiny", "qwen3_tiny", "llama3_tiny"])
def test_golden_checkpoints_are_read(shared, name):
    raw = json.loads((shared / "golden" / name / "config.json").read_text())
    config = ModelConfig.from_hf(raw, name)
    assert config.rope_theta == raw["rope_parameters"]["rope_theta"]
    assert config.head_dim == raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    ends = raw["eos_token_id"]
    assert config.eos_token_ids == (tuple(ends) if isinstance(ends, list) else (ends,))


@pytest.mark.parametrize(
    ("key", "value", "right"),
    [
        ("num_hidden_layers", 10**9, "at most 4096"),
        ("hidden_size", 1 << 40, "at most 1048576"),
        ("vocab_size", 10**12, "at most 16777216"),
        ("rms_norm_eps", float("nan"), "must be finite"),
        ("num_attention_heads", float("inf"), "must be finite"),
        ("max_position_embeddings", 10**15, "at most 2147483647"),
    ],
)
def test_sizes_of_no_model_are_refused(key, value, right):
    """Before any table of them is made, which would fill the memory."""
    raw = SMALL | {key: value}
    with pytest.raises(UserError, match=rf"^config\.json: {key} is .*{right}"):
        ModelConfig.from_hf(raw, "config.json")
