"""Questions about images from the command line: `generate --image`, rows with images, and `eval`."""

import json
from pathlib import Path

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file
from seeing_task import make_seeing_task

from mindrlhf.configs.images import read_image_settings


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


def generated(seeing, output, *arguments) -> list[dict]:
    argv = ["generate", "--model", seeing.model, "--output", output, "max_new_tokens=6", "--log_probs", *arguments]
    assert jobs.call(argv) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.mark.slow
def test_typed_questions_show_their_images(seeing, tmp_path):
    """The same pictures in one place or two, and a question without a picture behind it."""
    images = sorted(str(path) for path in (seeing.rows.parent / "images").iterdir())[:2]
    shown = [part for image in images for part in ("--image", image)]
    asked = ("--prompt", "<image> or <image>?", "--prompt", "Which?")
    both, before = generated(seeing, tmp_path / "out.jsonl", *asked, *shown, "--num_generations", 2)
    assert both["images"] == before["images"] == images
    assert both["prompt"] == "<image> or <image>?"
    assert len(both["responses"]) == 2
    assert both["responses"][0]["log_probs"] != before["responses"][0]["log_probs"]


@pytest.mark.slow
def test_rows_are_answered_and_scored(seeing, tmp_path, capfd):
    rows = [json.loads(line) for line in seeing.asked.read_text().splitlines()]
    found = generated(seeing, tmp_path / "out.jsonl", "--prompts", seeing.asked)
    assert [row.get("question") for row in found] == [row.get("question") for row in rows]
    assert [row["images"] for row in found] == [row["images"] for row in rows]
    capfd.readouterr()
    answers = tmp_path / "answers.jsonl"
    argv = ["eval", "--model", seeing.model, "--data", seeing.asked, "--max_new_tokens", 6, "--output", answers]
    assert jobs.call([*argv, "--reward", "math"]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["problems"] == len(rows)
    assert len(answers.read_text().splitlines()) == len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompts", "rows.jsonl", "--output", "out.jsonl", "--image", "a.png"), "--image is for --prompt"),
        (("--prompt", "Which?", "--image", "absent.png"), "image 1: there is no image file"),
        (("--prompt", "<image> <image>", "--image", "{one}"), "the row has 1 image, and its messages have 2 places"),
    ],
)
def test_what_does_not_fit_is_one_sentence(seeing, capfd, arguments, message):
    one = next((seeing.rows.parent / "images").iterdir())
    argv = ["generate", "--model", seeing.model, *(part.format(one=one) for part in arguments)]
    assert jobs.call(argv) == 2
    assert message in capfd.readouterr().err


@pytest.mark.parametrize("name", ["a.ckpt", "a.safetensors"])
def test_convert_writes_the_model_and_its_image_settings_back(seeing, tmp_path, name):
    file, back = tmp_path / name, tmp_path / "back"
    assert jobs.call(["convert", "--torch_ckpt_dir", seeing.model, "--mindspore_ckpt_path", file]) == 0
    given = ("--mindspore_ckpt_path", file, "--config_path", seeing.model)
    assert jobs.call(["convert", "--reverse", "--torch_ckpt_dir", back, *given]) == 0
    expected, found = (load_file(Path(folder, "model.safetensors")) for folder in (seeing.model, back))
    np.testing.assert_equal(found, expected)
    settings = [read_image_settings(folder) for folder in (seeing.model, back)]
    assert settings[0] == settings[1]
