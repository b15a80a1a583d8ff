"""Model YAMLs of models that see: the tower under HF's names, alone and beside a checkpoint's configuration."""

import json

import pytest
import yaml

from mindrlhf.configs.images import ImageSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import load_model_yaml
from mindrlhf.configs.validate import check_same_model
from mindrlhf.errors import UserError


@pytest.fixture(scope="module")
def released(shared):
    """The configuration of a released layout, by which each test's YAML is written."""
    raw = json.loads((shared / "golden" / "qwen2_5_vl_tiny" / "config.json").read_text())
    return ModelConfig.from_hf(raw, "config.json", seeing=True), raw


@pytest.fixture
def load(tmp_path, released):
    """Load a YAML of the released model with these keys of its tower, or of the text, changed; None removes one."""
    model, raw = released
    keys = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "spatial_merge_size")
    keys += ("temporal_patch_size", "window_size", "fullatt_block_indexes", "tokens_per_second")

    def loaded(text=(), **changes):
        tower = {key: raw["vision_config"][key] for key in keys}
        tower |= {"mrope_section": raw["rope_scaling"]["mrope_section"]} | changes
        group = {
            "model_type": "qwen2_5_vl",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "n_kv_heads": model.num_kv_heads,
            "intermediate_size": model.intermediate_size,
            "rms_norm_eps": model.rms_norm_eps,
            "theta": model.rope_theta,
            "tie_word_embeddings": model.tie_word_embeddings,
            "max_position_embedding": model.max_position_embeddings,
            "vision_config": {key: value for key, value in tower.items() if value is not None},
        } | dict(text)
        group = {key: value for key, value in group.items() if value is not None}
        path = tmp_path / "model.yaml"
        path.write_text(yaml.safe_dump({"model": {"model_config": group}}))
        return load_model_yaml(path)

    return loaded


def refused(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_yaml_describes_the_model_that_config_json_does(load, released):
    model, _ = released
    alone = load().architecture()
    of_checkpoint = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    tokens = {key: getattr(model.vision, key) for key in (*of_checkpoint, "vision_token_id")}
    assert alone.vision.model_copy(update=tokens) == model.vision
    assert alone.model_copy(update={"vision": model.vision, "eos_token_ids": model.eos_token_ids}) == model.model_copy(
        update={"pad_token_id": alone.pad_token_id, "bos_token_id": alone.bos_token_id}
    )
    assert load({"model_type": None}).architecture() == alone, "the tower says which family it is"


def test_the_tower_beside_a_checkpoint_is_the_checkpoints(load, released):
    model, _ = released
    with_images = model.model_copy(update={"vision": model.vision.model_copy(update={"images": ImageSettings()})})
    assert load().architecture(with_images) == with_images
    assert load(depth=None, mrope_section=None).architecture(with_images) == with_images
    assert load({"vision_config": None}).architecture(with_images) == with_images


@pytest.mark.parametrize(
    ("key", "value", "theirs"),
    [
        ("depth", 5, "4"),
        ("intermediate_size", 68, "64"),
        ("fullatt_block_indexes", [3], "(1, 3)"),
        ("mrope_section", [4, 2, 2], "(2, 3, 3)"),
        ("tokens_per_second", 4, "2"),
    ],
)
def test_a_tower_of_another_checkpoint_is_refused(load, released, key, value, theirs):
    message = refused(load(**{key: value}).architecture, released[0])
    assert f"vision_config.{key} is {tuple(value) if isinstance(value, list) else value}" in message
    assert f"(the checkpoint has {theirs})" in message


def test_a_tower_beside_a_model_of_text_is_refused(load, released):
    model, _ = released
    text = model.model_copy(update={"family": "qwen2", "vision": None})
    assert "model family is qwen2_5_vl (the checkpoint has qwen2)" in refused(load().architecture, text)


def test_what_is_missing_without_a_checkpoint_is_named(load):
    needed = ("depth", "hidden_size", "intermediate_size", "num_heads", "fullatt_block_indexes", "mrope_section")
    message = refused(load(**dict.fromkeys(needed)).architecture)
    assert f"lacks {', '.join(f'vision_config.{key}' for key in needed)};" in message
    assert "model.model_config lacks vision_config;" in refused(load({"vision_config": None}).architecture)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("depth", 0, "vision_config.depth is 0, and must be a whole number, at least 1"),
        ("merge_size", 2, "unknown key model.model_config.vision_config.merge_size"),
        ("window_size", "wide", "vision_config.window_size is 'wide', and must be a whole number"),
    ],
)
def test_a_wrong_key_of_the_tower_is_one_sentence(load, key, value, words):
    assert words in refused(lambda: load(**{key: value}))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_heads", 5, "vision_config: hidden_size 32 with num_heads 5 gives no heads"),
        ("mrope_section", [4, 4, 4], "the rotary sections [4, 4, 4] are 12 pairs, and heads of 16 have 8"),
    ],
)
def test_a_tower_that_cannot_be_is_refused(load, key, value, words):
    message = refused(load(**{key: value}).architecture)
    assert words.removeprefix("vision_config: ") in message
    assert "model.yaml: model.model_config" in message


def test_both_yamls_describe_one_tower(load):
    train, infer = load(), load(window_size=28)
    models = [one.architecture() for one in (train, infer)]
    message = refused(check_same_model, train, infer, *models)
    assert "is of another model: vision_config.window_size is 28 (" in message


def test_a_run_without_settings_of_images_is_refused(root, tmp_path, capsys):
    from mindrlhf import cli

    folder = root / "model_configs" / "qwen_grpo"
    yamls = ["--sft_path_train", f"{folder}/finetune_qwen2_5_vl_3b.yaml"]
    yamls += ["--sft_path_infer", f"{folder}/predict_qwen2_5_vl_3b_instruct.yaml"]
    data = tmp_path / "rows.jsonl"
    data.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert cli.main(["plan", *yamls, "--mind_dataset_dir", str(data)]) == 2
    error = capsys.readouterr().err
    assert "finetune_qwen2_5_vl_3b.yaml: has no preprocessor_config.json, which says how images are resized" in error
