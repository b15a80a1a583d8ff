"""Rollouts that survive their run: parts by step, put together at the end, complete after a resume."""

import os

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.records.rollout_parts import RolloutParts
from mindrlhf.records.rollout_record import read_rollout_record, read_rows, rows_of, to_columns
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


def columns(step: int) -> dict[str, list]:
    """Two prompts with two responses each; a NaN reward, text beyond ASCII."""
    rng = np.random.default_rng(step)
    experiences = []
    for prompt_id in (step, 2**40 + step):
        prompt = Prompt(prompt_id, rng.integers(0, 99, 3).astype(np.int32), {"question": "Wie viel? 🙂"})
        rollouts = []
        for sample in range(2):
            n = rng.integers(1, 9)
            ids, one, two = rng.integers(0, 99, n).astype(np.int32), *rng.random((2, n)).astype(np.float32)
            rollouts.append(Rollout(prompt_id, sample, ids, one, two, "eos", 7))
        rewards = np.array([1.0 if step % 2 else 1 / 3, np.nan], np.float32)
        group = RolloutGroup(prompt, tuple(rollouts))
        experiences.append(Experience(group, rewards, {"gsm8k": rewards}, np.zeros(2, np.float32)))
    return to_columns(step, experiences)


def same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert type(one[name]) is type(value), name
            if isinstance(value, np.ndarray):
                assert one[name].dtype == value.dtype
            np.testing.assert_array_equal(one[name], value)


def steps(count: int) -> list[dict]:
    return [row for step in range(1, count + 1) for row in rows_of(columns(step))]


def test_parts_become_one_record(tmp_path):
    parts = RolloutParts(tmp_path / "r.mindrecord")
    for step in (1, 2, 3):
        parts.add(step, columns(step))
    assert sorted(os.listdir(parts.folder)) == ["step_000001.npz", "step_000002.npz", "step_000003.npz"]
    parts.merge(finished=True)
    same(read_rows(tmp_path / "r.mindrecord"), steps(3))
    assert [step for step, _ in read_rollout_record(tmp_path / "r.mindrecord")] == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["r.mindrecord", "r.mindrecord.db"]


def test_nothing_to_merge(tmp_path):
    RolloutParts(tmp_path / "r.mindrecord").merge(finished=True)
    assert os.listdir(tmp_path) == []


def test_a_killed_run_goes_on(tmp_path):
    """Steps after the checkpoint are forgotten, half-written parts too; a fresh run forgets all."""
    file = tmp_path / "r.mindrecord"
    first = RolloutParts(file)
    for step in (1, 2, 3):
        first.add(step, columns(step))
    (first.folder / ".step_000004.0123abcd.tmp.npz").write_text("half")
    resumed = RolloutParts(file, steps_done=2)
    assert sorted(os.listdir(resumed.folder)) == ["step_000001.npz", "step_000002.npz"]
    assert resumed.missing == []
    resumed.add(3, columns(3))
    resumed.merge(finished=False)
    same(read_rows(file), steps(3))
    assert len(os.listdir(resumed.folder)) == 3
    RolloutParts(file, steps_done=0)
    assert os.listdir(first.folder) == []


def test_a_finished_run_goes_on(tmp_path):
    """Its parts are in the MindRecord: the earlier steps come from there."""
    file = tmp_path / "r.mindrecord"
    first = RolloutParts(file)
    for step in (1, 2, 3):
        first.add(step, columns(step))
    first.merge(finished=True)
    resumed = RolloutParts(file, steps_done=2)
    assert resumed.missing == []
    for step in (3, 4):
        resumed.add(step, columns(step))
    resumed.merge(finished=True)
    same(read_rows(file), steps(4))


def test_steps_that_are_nowhere_are_known(tmp_path):
    assert RolloutParts(tmp_path / "other.mindrecord", steps_done=3).missing == [1, 2, 3]


def test_a_damaged_part_is_named(tmp_path):
    parts = RolloutParts(tmp_path / "r.mindrecord")
    parts.add(1, columns(1))
    parts.add(2, columns(2))
    path = parts.folder / "step_000002.npz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"step_000002\.npz: is damaged"):
        parts.merge(finished=True)
    assert not (tmp_path / "r.mindrecord").exists()
    assert len(os.listdir(parts.folder)) == 2
