"""Responses written while a run trains: by step, put together at the end, complete after a resume."""

import os
import threading
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from responses import LOG_PROBS, made_rollout

from mindrlhf.configs.images import ImageSettings
from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json_lines
from mindrlhf.files.naming import step_files
from mindrlhf.images.processor import ImageProcessor
from mindrlhf.records.formats import read_record, read_record_rows
from mindrlhf.records.rows import SCHEMA, rows_of
from mindrlhf.records.writer import RecordParts, ResponseWriter
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


def experiences(step: int) -> list[Experience]:
    prompt = Prompt(step, np.array([1, 2], np.int32), {"ground_truth": "4"})
    log_probs = np.full(3, -0.5, np.float32)
    rollouts = tuple(made_rollout(step, i, np.arange(3), **dict.fromkeys(LOG_PROBS, log_probs)) for i in range(2))
    rewards = np.array([step, 0.5], np.float32)
    return [Experience(RolloutGroup(prompt, rollouts), rewards, {"gsm8k": rewards}, np.zeros(2, np.float32), step)]


def decode(ids) -> str:
    return " ".join(map(str, ids))


def test_both_forms_hold_every_step(tmp_path):
    record = RecordParts(tmp_path / "r.mindrecord")
    writer = ResponseWriter(tmp_path / "text", record, decode)
    for step in (1, 2, 3):
        writer.add(step, experiences(step))
    writer.close(finished=True)
    assert list(step_files(tmp_path / "text")) == [1, 2, 3]
    assert [row["reward"] for row in read_json_lines(step_files(tmp_path / "text")[3])] == [3.0, 0.5]
    assert [row["step"] for row in read_record_rows(tmp_path / "r.mindrecord")] == [1, 1, 2, 2, 3, 3]


def test_pictures_of_prompts_are_files_each_written_once(tmp_path, monkeypatch):
    settings = ImageSettings(min_pixels=64, max_pixels=256, patch_size=4)
    pixels = np.random.default_rng(0).integers(0, 256, (16, 8, 3), np.uint8)
    picture = ImageProcessor(settings).picture(pixels, "here")
    writer = ResponseWriter(tmp_path / "text", None, decode)
    for step in (1, 2):
        (plain,) = experiences(step)
        prompt = replace(plain.group.prompt, pictures=(picture, picture))
        writer.add(step, [replace(plain, group=replace(plain.group, prompt=prompt)), plain])
        writer.flush()
        assert [row.get("images") for row in read_json_lines(step_files(tmp_path / "text")[step])] == [
            *[[picture.name] * 2] * 2,
            *[None] * 2,
        ]
        (file,) = (tmp_path / "text" / "images").iterdir()
        assert np.array_equal(np.asarray(Image.open(file)), picture.pixels)
        monkeypatch.setattr(type(picture), "png", None)
    writer.close(finished=True)


def test_it_works_beside_the_caller_until_that_is_to_wait(tmp_path):
    caller, go = threading.get_ident(), threading.Event()
    seen = []

    def slow(ids):
        seen.append(threading.get_ident())
        assert go.wait(20)
        return ""

    writer = ResponseWriter(tmp_path, None, slow)
    writer.add(1, experiences(1))
    assert list(step_files(tmp_path)) == [], "the caller is here before anything is written"
    go.set()
    writer.flush()
    assert list(step_files(tmp_path)) == [1]
    assert caller not in seen
    writer.close(finished=True)


@pytest.mark.parametrize("when", ["add", "flush", "close"])
def test_what_cannot_be_written_is_said_at_every_occasion(tmp_path, when):
    """Also when another thread has heard it: a checkpoint that implies the step must not become whole."""
    (tmp_path / "text").write_text("a file where the folder is to be")
    writer = ResponseWriter(tmp_path / "text", None, decode)
    writer.add(1, experiences(1))
    then = {"add": lambda: writer.add(2, experiences(2)), "flush": writer.flush, "close": lambda: writer.close(False)}
    for occasion in (then[when], writer.flush, lambda: writer.close(finished=False)):
        with pytest.raises((UserError, OSError), match="text"):
            occasion()


def rows(step: int) -> list[dict]:
    """Two prompts with two responses each; a NaN reward, text beyond ASCII."""
    rng = np.random.default_rng(step)
    experiences = []
    for prompt_id in (step, 2**40 + step):
        prompt = Prompt(prompt_id, rng.integers(0, 99, 3).astype(np.int32), {"question": "Wie viel? 🙂"})
        rollouts = []
        for sample in range(2):
            n = rng.integers(1, 9)
            ids, one, two = rng.integers(0, 99, n).astype(np.int32), *rng.random((2, n)).astype(np.float32)
            tokens = {"sampled": one > 0.2, "behaviour_log_probs": one, "policy_log_probs": two}
            rollouts.append(Rollout(prompt_id, sample, ids, "eos", 7, tokens))
        rewards = np.array([1.0 if step % 2 else 1 / 3, np.nan], np.float32)
        group = RolloutGroup(prompt, tuple(rollouts))
        experiences.append(Experience(group, rewards, {"gsm8k": rewards}, np.zeros(2, np.float32), 1))
    return list(rows_of(step, experiences))


def same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(SCHEMA)
        for name, value in ((name, other[name]) for name in SCHEMA):
            assert type(one[name]) is type(value), name
            if isinstance(value, np.ndarray):
                assert one[name].dtype == value.dtype
            np.testing.assert_array_equal(one[name], value)


def steps(count: int) -> list[dict]:
    return [row for step in range(1, count + 1) for row in rows(step)]


def test_parts_become_one_record(tmp_path):
    parts = RecordParts(tmp_path / "r.mindrecord")
    for step in (1, 2, 3):
        parts.add(step, rows(step))
    assert sorted(os.listdir(parts.folder)) == ["step_000001.npz", "step_000002.npz", "step_000003.npz"]
    parts.merge(finished=True)
    same(read_record_rows(tmp_path / "r.mindrecord"), steps(3))
    assert [step for step, _ in read_record(tmp_path / "r.mindrecord")] == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["r.mindrecord", "r.mindrecord.db"]


def test_nothing_to_merge(tmp_path):
    RecordParts(tmp_path / "r.mindrecord").merge(finished=True)
    assert os.listdir(tmp_path) == []


def test_a_killed_run_goes_on(tmp_path):
    """Steps after the checkpoint are forgotten, half-written parts too; a fresh run forgets all."""
    file = tmp_path / "r.mindrecord"
    first = RecordParts(file)
    for step in (1, 2, 3):
        first.add(step, rows(step))
    (first.folder / ".step_000004.0123abcd.tmp.npz").write_text("half")
    resumed = RecordParts(file, steps_done=2)
    assert sorted(os.listdir(resumed.folder)) == ["step_000001.npz", "step_000002.npz"]
    assert resumed.missing == []
    resumed.add(3, rows(3))
    resumed.merge(finished=False)
    same(read_record_rows(file), steps(3))
    assert len(os.listdir(resumed.folder)) == 3
    RecordParts(file, steps_done=0)
    assert os.listdir(first.folder) == []


def test_a_finished_run_goes_on(tmp_path):
    """Its parts are in the MindRecord: the earlier steps come from there."""
    file = tmp_path / "r.mindrecord"
    first = RecordParts(file)
    for step in (1, 2, 3):
        first.add(step, rows(step))
    first.merge(finished=True)
    resumed = RecordParts(file, steps_done=2)
    assert resumed.missing == []
    for step in (3, 4):
        resumed.add(step, rows(step))
    resumed.merge(finished=True)
    same(read_record_rows(file), steps(4))


def test_steps_that_are_nowhere_are_known(tmp_path):
    assert RecordParts(tmp_path / "other.mindrecord", steps_done=3).missing == [1, 2, 3]


def test_a_damaged_part_is_named(tmp_path):
    parts = RecordParts(tmp_path / "r.mindrecord")
    parts.add(1, rows(1))
    parts.add(2, rows(2))
    path = parts.folder / "step_000002.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"step_000002\.npz: is damaged"):
        parts.merge(finished=True)
    assert not (tmp_path / "r.mindrecord").exists()
    assert len(os.listdir(parts.folder)) == 2
