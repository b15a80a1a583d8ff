"""Settings, folders and words that are refused, each with a sentence that names the fault and what would be right."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scoring_models import (
    change_config,
    scoring_config,
    small_tokenizer,
    write_classifier_adapter,
    write_scoring_model,
)

from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings
from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a classifier, and of a language model."""
    folder = tmp_path_factory.mktemp("models")
    for name, value_head in (("classifier", True), ("language", False)):
        write_scoring_model(folder / name, scoring_config(value_head=value_head))
    return folder


@pytest.fixture
def copy(folders, tmp_path):
    """Write a classifier of one's own; returns its folder."""
    write_scoring_model(tmp_path / "copy", scoring_config())
    return tmp_path / "copy"


def opened(*functions) -> None:
    with RewardRunner(RewardSettings(functions=functions)) as runner:
        runner.score([Sample("1 + 1", "2", {"question": "1 + 1"})])


def refused(function, *texts) -> None:
    with pytest.raises(UserError) as found:
        opened(function)
    sentence = str(found.value)
    assert "\n" not in sentence
    for text in texts:
        assert text in sentence


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("{name: model, path: x, paht: y}", ["unknown key paht; did you mean path?"]),
        ("{name: model, weight: 2}", ["model", "path is missing"]),
        ("{name: model, path: x, max_length: 1}", ["max_length is 1", "at least 2"]),
        ("{name: model, path: x, verdict: generated}", ["unknown key verdict"]),
        ("{name: judge, path: x, words: [a]}", ["words"]),
        ("{name: judge, path: x, verdict: sometimes}", ["verdict is 'sometimes'", "'log_probs', 'generated'"]),
        ("{name: gsm8k, path: x}", ["unknown key", "path"]),
    ],
)
def test_settings_of_the_wrong_form(given, texts):
    with pytest.raises(UserError) as found:
        RewardRunner(load_grpo_config(None, [f"reward.functions=[{given}]"]).reward)
    for text in texts:
        assert text in str(found.value)


def test_settings_stand_beside_the_name_or_behind_it():
    beside = RewardFunctionSettings(name="judge", weight=0.5, path="a b", words=["x", "y"])
    assert beside.args == {"path": "a b", "words": ["x", "y"]}
    assert RewardFunctionSettings(name="judge path='a b' words=[x,y]", weight=0.5) == beside
    assert RewardFunctionSettings(name="judge", weight=0.5, args=beside.args) == beside


def test_a_folder_that_is_not_there(folders):
    refused({"name": "model", "path": str(folders / "nowhere")}, "nowhere", "no such checkpoint")


def test_a_model_that_generates_has_no_score(folders):
    refused({"name": "model", "path": str(folders / "language")}, "ForSequenceClassification", "judge")


def test_a_classifier_does_not_judge(folders):
    refused(
        {"name": "judge", "path": str(folders / "classifier"), "template": "rubric"}, "is a classifier", "use model"
    )


@pytest.mark.parametrize("stated", [{"num_labels": 2}, {"num_labels": None, "id2label": {"0": "a", "1": "b"}}])
def test_two_labels_by_the_configuration(copy, stated):
    change_config(copy, **stated)
    refused({"name": "model", "path": str(copy)}, "has 2 labels", "num_labels 1")


def test_two_labels_by_the_weights(copy):
    file = copy / "model.safetensors"
    save_file(load_file(file) | {"score.weight": np.zeros((2, 32), np.float32)}, file)
    refused({"name": "model", "path": str(copy)}, "has 2 labels", "num_labels 1")


def test_a_score_that_is_missing(copy):
    file = copy / "model.safetensors"
    save_file({name: array for name, array in load_file(file).items() if name != "score.weight"}, file)
    refused({"name": "model", "path": str(copy)}, "holds no score.weight")


def test_adapters_without_their_base_or_a_score(folders, tmp_path):
    config = scoring_config()
    write_classifier_adapter(tmp_path / "plain", folders / "language", config, head=False)
    refused({"name": "model", "path": str(tmp_path / "plain")}, "holds no score.weight", "SEQ_CLS")
    write_classifier_adapter(tmp_path / "lost", tmp_path / "gone", config)
    refused({"name": "model", "path": str(tmp_path / "lost")}, "gone", "no model here")
    wide = write_scoring_model(tmp_path / "wide", scoring_config(hidden_size=64))
    assert wide
    other = {"path": str(tmp_path / "wide"), "adapter": str(tmp_path / "lost")}
    refused({"name": "model", **other}, "lost", "shape", "base model")
    both = {"path": str(tmp_path / "lost"), "adapter": str(tmp_path / "plain")}
    refused({"name": "model", **both}, "is an adapter, and so is")


def test_words_of_several_tokens(folders):
    judge = {"name": "judge", "path": str(folders / "language"), "template": "rubric"}
    refused({**judge, "words": ["yes", "perhaps"]}, "'perhaps' is", "tokens", "generated")
    refused({**judge, "words": ["yes", "yes"]}, "both of judge's words")


def test_templates_that_are_none(folders, tmp_path):
    judge = {"name": "judge", "path": str(folders / "language")}
    refused({**judge, "template": str(tmp_path / "none")}, "no such file")
    for source, text in (("{% if", "not a jinja2 template"), ("{{ answer }}{{ grade }}", "grade"), ("x", "answer")):
        (tmp_path / "judge.txt").write_text(source)
        refused({**judge, "template": str(tmp_path / "judge.txt")}, text)


def test_a_tokenizer_without_a_format(tmp_path):
    tokenizer = small_tokenizer(None)
    write_scoring_model(tmp_path / "own", scoring_config(), tokenizer=tokenizer)
    opened({"name": "model", "path": str(tmp_path / "own")})  # the family's markup
    text = (tmp_path / "own" / "tokenizer.json").read_text()
    (tmp_path / "own" / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|other|>"))
    refused({"name": "model", "path": str(tmp_path / "own")}, "no chat template", "chat_template")


def test_more_positions_than_the_model_has(folders):
    refused({"name": "model", "path": str(folders / "classifier"), "max_length": 5000}, "max_length to 4096")
