"""Configurations of models that see: both layouts, the released one out, and what is refused."""

import json

import pytest

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError


@pytest.fixture(scope="module")
def released(shared):
    return json.loads((shared / "golden" / "qwen2_5_vl_tiny" / "config.json").read_text())


def nested(raw):
    """The same configuration as transformers 5 writes it."""
    top = ("architectures", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    kept = {key: raw[key] for key in (*top, "vision_token_id", "model_type", "tie_word_embeddings")}
    text = {
        key: value for key, value in raw.items() if key not in (*kept, "vision_config", "rope_scaling", "rope_theta")
    }
    rope = {"rope_type": "default", "type": "default", "rope_theta": raw["rope_theta"]}
    text |= {"rope_parameters": rope | {"mrope_section": raw["rope_scaling"]["mrope_section"]}}
    text |= {"model_type": f"{raw['model_type']}_text", "dtype": "float32", "tie_word_embeddings": False}
    tower = {key: value for key, value in raw["vision_config"].items() if key not in ("in_chans", "spatial_patch_size")}
    return kept | {"text_config": text, "vision_config": tower | {"in_channels": 3, "model_type": raw["model_type"]}}


def test_the_released_layout_is_read(released):
    config = ModelConfig.from_hf(released, "file", seeing=True)
    vision = config.vision
    assert (config.hidden_size, config.head_dim, config.rope_theta, config.rope_scaling) == (64, 16, 1e6, None)
    assert config.tie_word_embeddings
    assert config.attention_bias
    assert (vision.depth, vision.hidden_size, vision.head_dim, vision.intermediate_size) == (4, 32, 16, 64)
    assert (vision.window_side, vision.full_attention_blocks, vision.sections) == (2, (1, 3), (2, 3, 3))
    assert (vision.image_token_id, vision.tokens_per_second) == (595, 2)
    assert vision.vision_tokens == (592, 593, 594, 595, 596)


def test_the_layout_of_transformers_5_is_the_same_model(released):
    assert ModelConfig.from_hf(nested(released), "file", seeing=True) == ModelConfig.from_hf(
        released, "file", seeing=True
    )


def test_the_released_layout_is_written(released):
    config = ModelConfig.from_hf(released, "file", seeing=True)
    written = config.to_hf()
    assert written["architectures"] == released["architectures"]
    assert written["vision_config"] == released["vision_config"]
    dead = {"sliding_window", "max_window_layers", "transformers_version"}
    assert {key: written[key] for key in released if key not in dead} == {
        key: value for key, value in released.items() if key not in dead
    }
    assert ModelConfig.from_hf(json.loads(json.dumps(written)), "file", seeing=True) == config


def test_transformers_reads_what_is_written(released):
    transformers = pytest.importorskip("transformers")
    written = ModelConfig.from_hf(released, "file", seeing=True).to_hf()
    ours = transformers.Qwen2_5_VLConfig.from_dict(written)
    theirs = transformers.Qwen2_5_VLConfig.from_dict(released)
    for group in ("text_config", "vision_config"):
        one, other = (getattr(config, group).to_dict() for config in (ours, theirs))
        dead = {"sliding_window", "max_window_layers", "head_dim", "transformers_version", "layer_types"}
        assert {key: one.get(key) for key in other if key not in dead} == {
            key: value for key, value in other.items() if key not in dead
        }


def test_left_out_sizes_are_those_of_the_class(released):
    raw = {key: value for key, value in released.items() if key not in ("rms_norm_eps", "video_token_id")}
    tower = {key: raw["vision_config"][key] for key in ("hidden_size", "num_heads", "depth")}
    config = ModelConfig.from_hf({**raw, "vision_config": tower}, "file", seeing=True)
    assert config.rms_norm_eps == 1e-5
    assert (config.vision.tokens_per_second, config.vision.full_attention_blocks) == (4, (7, 15, 23, 31))
    assert config.vision.video_token_id == 151656


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "file: vision_config is None, and must be an object"),
        ({"vision_config": {"in_chans": 1}}, "vision_config.in_chans is 1, and must be 3"),
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act is 'gelu', and must be 'silu'"),
        ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size is 32, and must be the text's hidden_size 64"),
        ({"vision_config": {"hidden_size": 30}}, "hidden_size 30 with num_heads 2 gives no heads of a multiple of 4"),
        ({"vision_config": {"window_size": 14}}, "window_size 14 is below one token of 28 pixels"),
        ({"vision_config": {"depth": "four"}}, "file: vision_config.depth is 'four', and must be a whole number"),
        ({"rope_scaling": None}, "file: rope_scaling.mrope_section is missing"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2]}},
            r"sections \[2, 2\] are 4 pairs, and heads of 16",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "mrope_section": [2, 3, 3]}}, "rotary scaling 'yarn' is not supported"),
        ({"text_config": 7}, "file: text_config is 7, and must be an object"),
    ],
)
def test_towers_that_compute_something_else_are_refused(released, changes, message):
    tower = changes.get("vision_config")
    if tower:
        changes = {"vision_config": released["vision_config"] | tower}
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hf(released | changes, "file", seeing=True)


def test_commands_that_take_no_images_refuse_the_family_by_name(shared):
    commands = "`mindrlhf train`, `sft`, `chat`, `generate`, `eval`, `export`, `convert` and `transform`"
    message = f"model_type is 'qwen2_5_vl', and a model with images, outside of {commands}, is not supported"
    with pytest.raises(UserError, match=message):
        read_hf_config(shared / "golden" / "qwen2_5_vl_tiny")
