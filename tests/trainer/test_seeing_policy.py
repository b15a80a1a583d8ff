"""GRPO with images: rollouts, log-probs and updates of one distribution, columns for rewards, resuming, refusals."""

import json
import shutil

import jobs
import numpy as np
import pytest
from safetensors.numpy import load_file
from seeing_task import make_seeing_task
from small_model import random_arrays, small_config

from mindrlhf.checkpoint.hf import read_hf_config, save_hf
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.models.parameters import parameter_table
from mindrlhf.models.vision.rows import HF_TOWER
from mindrlhf.report.groups import read_groups

# The reward reads a column of the rows, and differs between any two answers.
REWARD = """
def likes(prompt, completion, fields):
    return fields["level"] + len(set(completion)) / 10 - (fields["ground_truth"] not in ("red", "green", "blue"))
"""
SMALL = (
    "data.prompts_per_step=3",
    "rollout.num_generations=4",
    "rollout.max_new_tokens=6",
    "train.length_bucket=16",
    "optimizer.lr=1e-2",
    "algorithm.beta=0",
)


SAVED = ("trainer.save_freq=1", "optimizer.lr_decay=cosine", "trainer.save_rollouts=True")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_task(tmp_path_factory.mktemp("seeing"), depth=1, layers=1)


def training(seeing, output, *settings, data=None, **flags):
    reward = f"reward.functions=[{{name: '{seeing.rows.parent}/reward.py:likes'}}]"
    given = {"mind_dataset_dir": data or seeing.alike, "enable_compile_cache": True} | flags
    return seeing.training(output, reward, *SMALL, *settings, **given)


@pytest.fixture(scope="module")
def run(seeing, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    settings = ("trainer.total_steps=2", *SAVED)
    assert jobs.call(training(seeing, folder, *settings)) == 0
    return jobs.Run(folder)


@pytest.mark.slow
def test_generation_and_updates_have_one_distribution(run):
    assert run.column("rollout_corr/log_prob_diff/max").max() < 2e-5
    assert (run.column("actor/grad_norm") > 0).all()


@pytest.mark.slow
def test_records_have_the_tokens_of_images_once_as_text(seeing, run):
    vision = read_hf_config(seeing.model, seeing=True).vision
    for _, experiences in run.rollouts:
        for experience in experiences:
            shown = (experience.group.prompt.token_ids == vision.image_token_id).sum()
            assert shown == 4
            for rollout in experience.group.rollouts:
                assert not np.isin(rollout.response_ids, vision.vision_tokens).any()
    row = json.loads((run.folder / "rollouts" / "step_000001.jsonl").read_text().splitlines()[0])
    assert row["prompt"].count("<|image_pad|>") == row["prompt"].count("<|vision_start|>") == 1
    assert row["reward"] > 3
    assert all((run.folder / "rollouts" / "images" / f"{name}.png").is_file() for name in row["images"])
    (group, *_) = read_groups(run.folder / "rollouts" / "step_000001.jsonl", 1)
    assert [path.stem for path in group.images] == row["images"]


@pytest.mark.slow
def test_tower_and_text_learn(seeing, run):
    before, after = load_file(seeing.model / "model.safetensors"), run.weights
    assert before.keys() == after.keys()
    assert any(name.startswith(HF_TOWER) for name in before)
    assert all(not np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_was_never_stopped(seeing, run, tmp_path):
    """It goes on in a process of its own, from the checkpoint of a killed one."""
    shutil.copytree(run.folder, tmp_path / "stopped")
    for name in ("step_000002", "hf"):
        shutil.rmtree(tmp_path / "stopped" / "ckpt" / name)
    settings = ("trainer.total_steps=2", *SAVED)
    jobs.train_apart(training(seeing, tmp_path / "stopped", *settings, resume_training="auto"))
    other = jobs.Run(tmp_path / "stopped")
    assert other.responses == run.responses
    assert other.kept_metrics == run.kept_metrics
    ours, theirs = (one.folder / "ckpt" / "hf" / "model.safetensors" for one in (other, run))
    assert ours.read_bytes() == theirs.read_bytes()


def write_swapped(seeing):
    """The problems with pairs of rows' images exchanged."""
    rows = [json.loads(line) for line in seeing.alike.read_text().splitlines()]
    for one, other in zip(rows[::2], rows[1::2], strict=False):
        one["images"], other["images"] = other["images"], one["images"]
    file = seeing.alike.with_name("other.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_a_replay_of_the_record_is_the_run(seeing, run, tmp_path, capfd):
    settings = ("trainer.total_steps=2", "optimizer.lr_decay=cosine")
    record = run.folder / "rollouts.mindrecord"
    argv = training(seeing, tmp_path, *settings, replay=record, save_data_file=tmp_path / "again.mindrecord")
    assert jobs.call(argv) == 0
    ours, theirs = (one / "ckpt" / "hf" / "model.safetensors" for one in (tmp_path, run.folder))
    assert ours.read_bytes() == theirs.read_bytes()
    argv = training(seeing, tmp_path / "other", *settings, replay=record, data=write_swapped(seeing))
    assert jobs.call(argv) == 2
    assert "has a prompt that is not row" in capfd.readouterr().err


@pytest.mark.slow
def test_other_pictures_are_another_run(seeing, run, tmp_path, capfd):
    shutil.copytree(run.folder, tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "ckpt" / "hf")
    settings = ("trainer.total_steps=3", *SAVED)
    argv = training(seeing, tmp_path / "stopped", *settings, data=write_swapped(seeing), resume_training="auto")
    assert jobs.call(argv) == 2
    assert "was trained on other prompts" in capfd.readouterr().err


@pytest.mark.slow
def test_reference_validation_and_several_updates_run(seeing, tmp_path):
    settings = (
        "trainer.total_steps=2",
        "algorithm.beta=0.1",
        "algorithm.updates_per_iteration=3",
        "algorithm.entropy_coef=0.01",
        f"data.val_dataset={seeing.asked}",
        "validation.reward=all",
        "trainer.test_freq=1",
        "train.max_tokens_per_micro_batch=64",
    )
    assert jobs.call(training(seeing, tmp_path, *settings, data=seeing.asked)) == 0
    rows = jobs.Run(tmp_path).metrics
    assert all("val/reward" in row for row in rows)
    steps = [row for row in rows if "actor/grad_norm" in row]
    assert len(steps) == 2
    assert max(row["rollout_corr/log_prob_diff/max"] for row in steps) < 2e-5
    assert all(row["actor/kl_loss"] > 0 for row in steps)


def write_text_model(seeing, folder):
    """A model of the same tokens that does not see."""
    config = small_config(vocab_size=read_hf_config(seeing.model, seeing=True).vocab_size, num_layers=1)
    arrays = random_arrays(config)
    tensors = ((spec, arrays[spec.name]) for spec in parameter_table(config))
    save_hf(folder, config, tensors, tokenizer=Tokenizer.from_path(seeing.model))
    return folder


def test_a_teacher_that_does_not_see_is_refused(seeing, tmp_path, capfd):
    text = write_text_model(seeing, tmp_path / "text")
    settings = ("algorithm.advantage=distillation", f"algorithm.teacher={text}")
    assert jobs.call(training(seeing, tmp_path, *settings)) == 2
    assert f"{text} takes text alone, and the policy sees; give a model that sees" in capfd.readouterr().err


def test_a_broken_image_is_named_with_its_file_and_row(seeing, tmp_path, capfd):
    (tmp_path / "broken.png").write_bytes(b"\x89PNG")
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"question": "Which?", "ground_truth": "red", "image": "broken.png"})
    )
    assert jobs.call(training(seeing, tmp_path, "trainer.total_steps=1", data=tmp_path / "rows.jsonl")) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{tmp_path}/rows.jsonl, line 1: image 1: {tmp_path}/broken.png: the bytes are no image" in line
