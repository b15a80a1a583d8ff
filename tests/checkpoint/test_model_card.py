"""The model card: origin, data, settings, seed, and the curve at a few steps and as a picture."""

import json

import pytest

from mindrlhf.checkpoint.model_card import ModelCard, adapter_card, origin, read_card

CARD = ModelCard(
    "Org/Tiny", "Org/Tiny", "reinforcement learning", "train.jsonl: 8 prompts", 7, {"optimizer.lr": "1e-05"}
)


def write_metrics(folder, rows):
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_card(folder, card: ModelCard):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in card.files().items():
        (folder / name).write_bytes(content)
    return folder


def test_the_curve_has_first_and_last_step_and_a_few_between(tmp_path):
    rows = [{"step": 0, "val/accuracy": 0.0}]  # the validation before the first step has no reward
    rows += [{"step": step, "critic/rewards/mean": step / 100, "train/loss": 9.0} for step in range(1, 101)]
    card = CARD.measured({"critic/rewards/mean": 1.0, "timing_s/step": 3.0}, write_metrics(tmp_path, rows))
    assert len(card.curve) == 11
    assert {1: 0.01, 100: 1.0}.items() <= card.curve.items()
    assert all(value == step / 100 for step, value in card.curve.items())
    text = str(card)
    assert "| seed | 7 |" in text
    assert "| 1 | 0.01 |" in text
    assert "| critic/rewards/mean | 1 |" in text
    assert "timing_s" not in text


@pytest.mark.parametrize("metric", ["critic/rewards/mean", "train/loss"])
def test_the_picture_is_beside_the_card_and_shown_by_it(tmp_path, metric):
    card = CARD.measured({}, write_metrics(tmp_path, [{"step": step, metric: step / 4} for step in range(1, 9)]))
    files = card.files()
    assert files.keys() == {"README.md", "curves.png"}
    assert files["curves.png"].startswith(b"\x89PNG")
    assert b"](curves.png)" in files["README.md"]
    assert read_card(write_card(tmp_path / "model", card)) == files
    adapted = adapter_card(files)
    assert adapted["curves.png"] == files["curves.png"]
    assert b"library_name: peft\n" in adapted["README.md"]


@pytest.mark.parametrize(("steps", "drawn"), [(4, False), (5, True)])
def test_a_few_steps_are_a_table_alone(tmp_path, steps, drawn):
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, steps + 1)]
    files = CARD.measured({}, write_metrics(tmp_path, rows)).files()
    assert (b"](curves.png)" in files["README.md"], "curves.png" in files) == (drawn, drawn)
    assert b"| 1 | 1 |" in files["README.md"]


def test_a_run_of_fine_tuning_shows_its_loss(tmp_path):
    assert CARD.measured({}, write_metrics(tmp_path, [{"step": 4, "train/loss": 2.5}])).curve == {4: 2.5}


def test_a_run_without_steps_has_no_curve(tmp_path):
    for path in (None, tmp_path / "none.jsonl", write_metrics(tmp_path, [{"step": 0, "val/loss": 1.0}])):
        files = CARD.measured({}, path).files()
        assert files.keys() == {"README.md"}
        assert b"by step" not in files["README.md"]
        assert b"curves.png" not in files["README.md"]


def test_the_origin_is_an_id_only_where_there_is_one(tmp_path):
    """A folder's name is no model of a hub's: its id is the one that its card names."""
    cached = tmp_path / "hub" / "models--Org--Tiny" / "snapshots" / "0abc"
    assert origin(None) == (None, "random weights")
    assert origin(str(cached)) == ("Org/Tiny", "Org/Tiny")
    assert origin(str(tmp_path / "ckpt" / "hf")) == (None, "the local folder ckpt/hf")
    tuned = write_card(tmp_path / "tuned" / "hf", CARD)
    assert origin(str(tuned)) == ("Org/Tiny", "the local folder tuned/hf, trained from Org/Tiny")
    named = write_card(tmp_path / "named" / "hf", ModelCard("hf", "hf", "", "", 0, {}))
    assert origin(str(named)) == (None, "the local folder named/hf"), "as older cards have it"


@pytest.mark.parametrize("path", [None, "ckpt/hf"])
def test_a_card_without_an_id_names_no_base_model(path):
    text = str(ModelCard(*origin(path), "reinforcement learning", "train.jsonl", 0, {}))
    assert text.startswith("---\nlibrary_name: transformers\n")
    assert "base_model" not in text
    assert "| first weights | random weights |" in text or "| first weights | the local folder ckpt/hf |" in text


def test_values_stay_in_their_cells():
    """Names of files, tasks and metrics come from others; none begins a line, a cell or markup of its own."""
    evil = "a\n# Title\n| b | c |\\| <script>x</script> \x1b[2J"
    card = ModelCard(None, evil, evil, evil, 7, {evil: evil}, {f"val/{evil}": 1.0})
    lines = str(card).splitlines()
    assert not [line for line in lines if line.startswith("# Title")]
    assert "<script" not in str(card)
    assert "\x1b" not in str(card)
    rows = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in rows} == {3}
