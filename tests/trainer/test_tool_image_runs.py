"""GRPO with a tool that answers with images: updates, records, replay, kill and resume, and what is refused."""

import json
import shutil

import jobs
import numpy as np
import pytest
from painting_task import make_painting_task
from safetensors.numpy import load_file

from mindrlhf.checkpoint.hf import read_hf_config
from mindrlhf.report.answers import AnswerReader
from mindrlhf.report.groups import read_groups

SMALL = (
    "data.prompts_per_step=3",
    "rollout.num_generations=2",
    "rollout.max_new_tokens=96",
    "rollout.stop_strings=[e, '3', a, '1', h, R]",
    "rollout.tool_images=True",
    "train.length_bucket=64",
    "optimizer.lr=1e-2",
    "algorithm.beta=0.1",
    "trainer.save_rollouts=True",
    "trainer.token_figures=2",
    "optimizer.lr_decay=cosine",
    "trainer.save_freq=1",
)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_painting_task(tmp_path_factory.mktemp("seeing"))


def training(seeing, output, *settings, environment="painter.py:Painter", **flags):
    folder = seeing.rows.parent
    reward = f"reward.functions=[{{name: environment}}, {{name: '{folder}/reward.py:pictures'}}]"
    talks = [f"rollout.environment={folder}/{environment}"] if environment else []
    return seeing.training(output, reward, *SMALL, *talks, *settings, **{"enable_compile_cache": True} | flags)


@pytest.fixture(scope="module")
def run(seeing, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert jobs.call(training(seeing, folder, "trainer.total_steps=2")) == 0
    return jobs.Run(folder)


def rollouts(run):
    return [one for _, step in run.rollouts for e in step for one in e.group.rollouts]


@pytest.mark.slow
def test_generation_and_updates_have_one_distribution(seeing, run):
    assert run.column("rollout_corr/log_prob_diff/max").max() < 2e-5
    assert (run.column("actor/grad_norm") > 0).all()
    assert (run.column("conversation/images") > 1).all()
    shown = [rollout.pictures for rollout in rollouts(run)]
    assert sum(map(len, shown)) >= 12
    assert len({picture.digest for own in shown for picture in own.values()}) >= 3
    before = load_file(seeing.model / "model.safetensors")
    assert all(not np.array_equal(before[name], run.weights[name]) for name in before)


@pytest.mark.slow
def test_an_image_s_tokens_are_context_and_their_places_known(seeing, run):
    vision = read_hf_config(seeing.model, seeing=True).vision
    for rollout in rollouts(run):
        places = [first + i for first, picture in rollout.pictures.items() for i in range(picture.tokens)]
        assert np.flatnonzero(rollout.response_ids == vision.image_token_id).tolist() == places
        assert not rollout.sampled[places].any()


@pytest.mark.slow
def test_records_and_report_show_images_at_their_turns(run):
    folder = run.folder / "rollouts"
    rows = [json.loads(line) for line in (folder / "step_000001.jsonl").read_text().splitlines()]
    for row in rows:
        names = row.get("turn_images", [[]] * len(row["turns"]))
        for (drawn, text), own in zip(row["turns"], names, strict=True):
            assert text.count("<|image_pad|>") == len(own)
            assert not (drawn and own)
            assert all((folder / "images" / f"{name}.png").is_file() for name in own)
        assert row["rewards"]["pictures"] >= sum(map(len, names))
        if "tokens" in row:
            assert "".join(row["tokens"]["text"]).count("<|image_pad|>") == sum(map(len, names))
    assert any("turn_images" in row for row in rows)
    shown = [row for group in read_groups(folder / "step_000001.jsonl", 1) for row in group.samples]
    files = [file for row in shown for own in row.get("turn_images", ()) for file in own]
    assert files
    assert all(file.is_file() for file in files)
    assert AnswerReader().read(run.folder, 2).chunks


@pytest.mark.slow
def test_a_replay_makes_the_same_updates(seeing, run, tmp_path):
    flags = {"replay": run.folder / "rollouts.mindrecord", "save_data_file": tmp_path / "again.mindrecord"}
    assert jobs.call(training(seeing, tmp_path, "trainer.total_steps=2", **flags)) == 0
    again = jobs.Run(tmp_path)
    for name in ("actor/loss", "actor/grad_norm", "actor/kl_loss", "actor/entropy"):
        np.testing.assert_array_equal(again.column(name), run.column(name))
    ours, theirs = (one.folder / "ckpt" / "hf" / "model.safetensors" for one in (again, run))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_a_resumed_run_is_the_one_that_was_never_stopped(seeing, run, tmp_path):
    """It goes on in a process of its own, from the checkpoint of a killed one."""
    shutil.copytree(run.folder, tmp_path / "stopped")
    for name in ("step_000002", "hf"):
        shutil.rmtree(tmp_path / "stopped" / "ckpt" / name)
    jobs.train_apart(training(seeing, tmp_path / "stopped", "trainer.total_steps=2", resume_training="auto"))
    other = jobs.Run(tmp_path / "stopped")
    assert other.responses == run.responses
    ours, theirs = ([{**row, "tools/seconds": 0} for row in one.kept_metrics] for one in (other, run))
    assert ours == theirs
    ours, theirs = (one.folder / "ckpt" / "hf" / "model.safetensors" for one in (other, run))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 4])
def test_slots_change_no_token(seeing, run, tmp_path, slots):
    assert jobs.call(training(seeing, tmp_path, "trainer.total_steps=1", f"rollout.max_slots={slots}")) == 0
    for ours, theirs in zip(rollouts(jobs.Run(tmp_path)), rollouts(run), strict=False):
        np.testing.assert_array_equal(ours.response_ids, theirs.response_ids)
        np.testing.assert_array_equal(ours.row("policy_log_probs"), theirs.row("policy_log_probs"))


@pytest.mark.parametrize(
    ("settings", "environment", "said"),
    [
        (("rollout.tokens_per_step=20", "trainer.staleness=1"), "painter.py:Painter", "draws answers in parts"),
        ((), None, "there are neither tools nor an environment"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(seeing, tmp_path, capfd, settings, environment, said):
    assert jobs.call(training(seeing, tmp_path, "trainer.total_steps=1", *settings, environment=environment)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "rollout.tool_images is True" in line
    assert said in line


def test_a_model_of_text_is_refused_by_name(tmp_path, capfd):
    task = jobs.make_task(tmp_path / "task", layers=1)
    settings = ("rollout.tools=[calculator]", "rollout.tool_images=True")
    assert jobs.call(task.train(tmp_path / "run", *settings)) == 2
    assert "rollout.tool_images is True, and a model of the family" in capfd.readouterr().err


@pytest.mark.slow
def test_generate_and_eval_show_images_too(seeing, tmp_path, capfd):
    folder = seeing.rows.parent
    talks = ["--environment", f"{folder}/painter.py:Painter", "--tool_images", "True", "--max_turns", "3"]
    output = tmp_path / "responses.jsonl"
    given = ["--model", seeing.model, "--prompts", seeing.alike, "--limit", "3", "--output", output, *talks]
    settings = ("max_new_tokens=64", "stop_strings=[e, '3', a, '1', h, R]", "temperature=1.0")
    assert jobs.call(["generate", *map(str, given), *settings]) == 0
    responses = [one for line in output.read_text().splitlines() for one in json.loads(line)["responses"]]
    texts = [text for one in responses for drawn, text in one["turns"] if not drawn]
    assert sum(text.count("<|image_pad|>") for text in texts) >= 3
    assert all(text.count("<|image_pad|>") == text.count("<|vision_start|>") for text in texts)
    reward = ["--reward", f"{folder}/reward.py:pictures", "--max_new_tokens", "64"]
    data = ["--data", seeing.alike, "--limit", "3", "--model", seeing.model]
    capfd.readouterr()
    assert jobs.call(["eval", *map(str, data), *reward, *talks]) == 0
    assert json.loads(capfd.readouterr().out.splitlines()[-1])["conversation/images"] > 0
