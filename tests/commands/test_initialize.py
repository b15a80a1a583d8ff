"""`mindrlhf initialize`: random weights of a shape with a tokenizer's ids; what does not fit is refused."""

import json

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.data.tokenizer import Tokenizer, train_tokenizer

SHAPE = "model_configs/qwen_grpo/qwen2_5_vl_tiny"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of a tokenizer without tokens of images, and of one with them."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in ("plain", "seeing"):
        train_tokenizer(["some text"], 300, images=name == "seeing").save(folder / name)
    return folder


def initialize(config, tokenizer, output, *more):
    return jobs.call(["initialize", "--config", config, "--tokenizer_path", tokenizer, "--output", output, *more])


def test_a_model_that_sees(tokenizers, tmp_path, capfd):
    assert initialize(SHAPE, tokenizers / "seeing", tmp_path / "one") == 0
    assert initialize(f"{SHAPE}/config.json", tokenizers / "seeing", tmp_path / "other", "--seed", 1) == 0
    config, tokenizer = read_hf_config(tmp_path / "one", seeing=True), Tokenizer.from_path(tmp_path / "one")
    assert config.vocab_size == tokenizer.size
    assert tokenizer.id_to_token(config.vision.image_token_id) == "<|image_pad|>"
    assert {tokenizer.id_to_token(token) for token in config.vision.vision_tokens} == {
        *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
    }
    assert [tokenizer.id_to_token(token) for token in config.eos_token_ids] == ["<|im_end|>"]
    assert config.vision.images.patch_size == config.vision.patch_size == 8
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    drawn = {name: array for name, array in one.items() if not name.endswith(("bias", "norm.weight", "norm1.weight"))}
    table = drawn["visual.blocks.0.attn.qkv.weight"]
    assert table.std() == pytest.approx(config.initializer_range, rel=0.02)
    assert not np.array_equal(table, other["visual.blocks.0.attn.qkv.weight"])
    assert not one["visual.blocks.0.attn.qkv.bias"].any()
    assert f"{sum(array.size for array in one.values()):,} parameters" in capfd.readouterr().out


def test_a_model_of_text_needs_no_tokens_of_images(tokenizers, tmp_path, model_shape):
    assert initialize(model_shape, tokenizers / "plain", tmp_path / "model") == 0
    config = read_hf_config(tmp_path / "model")
    assert (config.family, config.vocab_size) == ("qwen2", Tokenizer.from_path(tokenizers / "plain").size)
    assert config.pad_token_id == Tokenizer.from_path(tokenizers / "plain").pad_token_id


@pytest.fixture
def model_shape(tmp_path):
    shape = {"model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 9, "eos_token_id": 5, "bos_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return tmp_path / "config.json"


def test_what_does_not_fit_is_refused(tokenizers, tmp_path, capfd):
    assert initialize(SHAPE, tokenizers / "plain", tmp_path / "model") == 2
    assert f"{tokenizers}/plain: has no <|image_pad|>, which images of Qwen2.5-VL need" in capfd.readouterr().err
    (tmp_path / "config.json").write_text((jobs.ROOT / SHAPE / "config.json").read_text())
    assert initialize(tmp_path, tokenizers / "seeing", tmp_path / "model") == 2
    assert "has no preprocessor_config.json" in capfd.readouterr().err
    assert not (tmp_path / "model").exists()
