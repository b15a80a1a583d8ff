"""Fine-tuning a model that sees: its loss is the oracle's, it learns what pictures show, and what is refused."""

import json
import shutil

import jobs
import numpy as np
import pytest
import reference_tower
from safetensors.numpy import load_file
from seeing_task import make_seeing_task
from small_model import log_softmax

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.run.picture_rows import read_shown


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


def tuning(seeing, output, *settings, data=None):
    flags = ("--load_sft_checkpoint_train", seeing.model, "--mind_dataset_dir", data or seeing.rows)
    one_shape = "train.length_bucket=64"  # of one image and of two; each further shape is compiled for seconds
    small = ("data.pairs_per_step=6", "optimizer.lr=1e-2", f"data.val_dataset={seeing.swapped}", one_shape)
    return ["sft", *flags, "--save_ckpt_dir", output / "ckpt", "--enable_compile_cache", "True", *small, *settings]


@pytest.fixture(scope="module")
def tuned(seeing, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    settings = ("trainer.total_steps=40", "trainer.test_freq=40", "optimizer.lr_decay=linear")
    assert jobs.call(tuning(seeing, folder, *settings)) == 0
    return jobs.Run(folder)


def oracle_loss(model, data):
    """The mean of -log p over all tokens that the assistant writes, in float64."""
    config, weights = read_hf_config(model, seeing=True), load_file(model / "model.safetensors")
    losses = []
    for shown in read_shown(data, Tokenizer.from_path(model), config.vision):
        ids = np.concatenate([shown.turns.prompt_ids, shown.turns.response_ids])
        pictures = [(picture.patches(), picture.grid) for picture in (*shown.prompt, *shown.response)]
        found = log_softmax(reference_tower.logits(config, weights, ids[:-1], pictures))
        own = found[np.arange(len(ids) - 1), ids[1:]][len(shown.turns.prompt_ids) - 1 :]
        losses += list(-own[shown.turns.sampled])
    return np.mean(losses)


def test_the_loss_is_the_oracle_s_before_and_after(seeing, tuned):
    first, *_, last = (row["val/loss"] for row in tuned.metrics if "val/loss" in row)
    assert first == pytest.approx(oracle_loss(seeing.model, seeing.swapped), rel=1e-5)
    assert last == pytest.approx(oracle_loss(tuned.folder / "ckpt" / "hf", seeing.swapped), rel=1e-4)


def test_it_learns_what_the_pictures_show(tuned):
    """A third of the answers would be right without them; with other pictures, none is."""
    assert tuned.metrics[-1]["train/loss"] < 0.05
    assert tuned.metrics[-1]["val/loss"] > 1.0


def test_the_trained_model_has_its_images_preparation_and_another_tower(seeing, tuned):
    folder = tuned.folder / "ckpt" / "hf"
    for name in ("preprocessor_config.json", "config.json"):
        ours, theirs = (json.loads((one / name).read_text()) for one in (folder, seeing.model))
        assert ours.keys() == theirs.keys()
    assert read_hf_config(folder, seeing=True).vision == read_hf_config(seeing.model, seeing=True).vision
    before, after = (load_file(one / "model.safetensors") for one in (seeing.model, folder))
    assert before.keys() == after.keys()
    assert all(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_was_never_stopped(seeing, tmp_path):
    settings = ("trainer.total_steps=3", "trainer.save_freq=1", "optimizer.lr_decay=cosine")
    assert jobs.call(tuning(seeing, tmp_path / "whole", *settings)) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    for name in ("step_000003", "hf"):
        shutil.rmtree(tmp_path / "stopped" / "ckpt" / name)
    assert jobs.call([*tuning(seeing, tmp_path / "stopped", *settings), "--resume_training", "auto"]) == 0
    ours, theirs = (tmp_path / name / "ckpt" / "hf" / "model.safetensors" for name in ("stopped", "whole"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_answers_to_held_out_problems_are_scored(seeing, tmp_path):
    right = "def right(completion, ground_truth):\n    return float(completion.strip() == ground_truth)\n"
    (tmp_path / "reward.py").write_text(right)
    reward = f"validation.reward={tmp_path}/reward.py:right"
    settings = (f"data.val_problems={seeing.asked}", reward, "validation.max_new_tokens=6")
    more = ("trainer.total_steps=60", "trainer.test_freq=60", "optimizer.lr_decay=linear")
    assert jobs.call(tuning(seeing, tmp_path, *settings, *more)) == 0
    accuracy = [row["val-core/fields/acc/mean@1"] for row in jobs.Run(tmp_path).metrics if "val/loss" in row]
    assert accuracy[-1] > 0.9


def test_a_broken_image_is_named_with_its_file_and_row(seeing, tmp_path, capfd):
    row = json.loads(seeing.rows.read_text().splitlines()[0])
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"images": ["broken.png"]}) + "\n")
    assert jobs.call(tuning(seeing, tmp_path, "trainer.total_steps=1", data=tmp_path / "rows.jsonl")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{tmp_path}/rows.jsonl, line 2: image 1: {tmp_path}/broken.png: the bytes are no image" in line
