"""Checkpoints of a model that sees: both layouts of names in, the released one out, byte for byte."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.checkpoint.weight_source import open_weights
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import decoded_rows, parameter_count, parameter_table


@pytest.fixture(scope="module")
def folder(shared):
    return shared / "golden" / "qwen2_5_vl_tiny"


@pytest.fixture(scope="module")
def config(folder):
    return read_hf_config(folder, seeing=True)


def read(path, config):
    source = open_weights(path, config)
    return {spec.name: source.read(spec.name) for spec in parameter_table(config)}


def renamed(weights):
    names = {name: f"model.{name}" if name.startswith("visual.") else name for name in weights}
    text = {name: f"model.language_model.{name[6:]}" for name in weights if name.startswith("model.")}
    return {(names | text)[name]: array for name, array in weights.items()}


def test_every_tensor_has_a_row(folder, config):
    weights = load_file(folder / "model.safetensors")
    assert {spec.hf_name: spec.shape for spec in parameter_table(config)} == {
        name: array.shape for name, array in weights.items()
    }
    assert parameter_count(config) == sum(array.size for array in weights.values())


def test_the_checkpoint_is_written_as_it_was_read(folder, config, tmp_path):
    source = open_weights(folder, config)
    save_hf(tmp_path / "out", config, ((spec, source.read(spec.name)) for spec in parameter_table(config)))
    stored, written = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert set(stored) == set(written)
    assert all(stored[name].tobytes() == written[name].tobytes() for name in stored)
    assert read_hf_config(tmp_path / "out", seeing=True) == config
    own, out = (json.loads((one / "preprocessor_config.json").read_text()) for one in (folder, tmp_path / "out"))
    assert own == out


def test_a_preparation_of_images_with_other_patches_is_refused(folder, tmp_path):
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    raw = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(raw | {"patch_size": 16}))
    with pytest.raises(UserError, match="patch_size is 16 for images and 14 in the tower"):
        read_hf_config(tmp_path, seeing=True)


def test_end_tokens_of_both_files_are_read_in_the_layout_of_transformers_5(folder, tmp_path):
    raw = json.loads((folder / "config.json").read_text())
    top = ("model_type", "vision_config", "image_token_id", "video_token_id", "tie_word_embeddings")
    text = {key: value for key, value in raw.items() if key not in top}
    (tmp_path / "config.json").write_text(json.dumps({key: raw[key] for key in top} | {"text_config": text}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1], "pad_token_id": 3}))
    config = read_hf_config(tmp_path, seeing=True)
    assert (config.eos_token_ids, config.pad_token_id) == ((1, 7), 3)


def test_names_of_transformers_5_are_read(folder, config, tmp_path):
    weights = renamed(load_file(folder / "model.safetensors"))
    assert "model.visual.merger.mlp.0.bias" in weights
    assert "model.language_model.layers.2.mlp.up_proj.weight" in weights
    save_file(weights, tmp_path / "model.safetensors")
    ours, theirs = read(folder, config), read(tmp_path, config)
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def test_a_missing_piece_of_the_tower_is_named(folder, config, tmp_path):
    weights = load_file(folder / "model.safetensors")
    del weights["visual.blocks.2.mlp.down_proj.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"the weight visual\.blocks\.2\.mlp\.down_proj\.bias is missing"):
        read(tmp_path, config)


def test_decode_steps_multiply_by_no_matrix_of_the_tower(config):
    assert all("visual" not in spec.name for spec in decoded_rows(config))
