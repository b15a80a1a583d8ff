import errno
import json
import os

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.files.json import json_lines, read_json_lines
from mindrlhf.records.rollout_dump import rollout_file, rollout_rows, write_rollouts
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup

WORDS = ["<|im_end|>", "2", "+", "=", "4", "五"]


def decode(ids: np.ndarray) -> str:
    return "".join(WORDS[index] for index in ids)


@pytest.fixture
def experience():
    def rollout(index, ids, finish):
        log_probs = np.zeros(len(ids), np.float32)
        return Rollout(7, index, np.array(ids, np.int32), log_probs, log_probs, finish, 0)

    prompt = Prompt(7, np.array([1, 2, 1, 3], np.int32), {"task": "gsm8k", "ground_truth": "4"})
    group = RolloutGroup(prompt, (rollout(0, [4, 0], "eos"), rollout(1, [5, 5, 5], "length")))
    return Experience(
        group,
        np.array([1.5, np.nan], np.float32),
        {"gsm8k": np.array([1, np.nan], np.float32), "format": np.array([0.5, np.nan], np.float32)},
        np.array([0.75, 0], np.float32),
    )


def test_a_step_reads_back_as_text(tmp_path, experience):
    path = write_rollouts(tmp_path / "rollouts", 12, json_lines(rollout_rows(12, [experience], decode)))
    assert path == rollout_file(tmp_path / "rollouts", 12)
    assert path.name == "step_000012.jsonl"
    first, second = read_json_lines(path)
    assert first == {
        "step": 12,
        "prompt_id": 7,
        "sample_index": 0,
        "prompt": "2+2=",
        "completion": "4<|im_end|>",
        "ground_truth": "4",
        "reward": 1.5,
        "rewards": {"gsm8k": 1.0, "format": 0.5},
        "advantage": 0.75,
        "finish_reason": "eos",
        "prompt_length": 4,
        "response_length": 2,
    }
    assert second["rewards"] == {"gsm8k": None, "format": None}
    assert second["reward"] is None
    assert second["finish_reason"] == "length"
    assert "五五五" in path.read_text(encoding="utf-8"), "readable in an editor, without escapes"
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_an_earlier_dump_alone(tmp_path, experience, monkeypatch):
    path = write_rollouts(tmp_path, 1, json_lines(rollout_rows(1, [experience], decode)))
    before = path.read_bytes()

    def interrupted(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(UserError, match="No space left"):
        write_rollouts(tmp_path, 1, b"other")
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_rows_are_plain_json(experience):
    rows = rollout_rows(3, [experience], decode)
    assert json.loads(json.dumps(rows))[0] == rows[0]
