"""Responses that are written beside the training: nothing is lost, and what goes wrong is said."""

import threading

import numpy as np
import pytest

from mindrlhf.errors import UserError
from mindrlhf.files.json import read_json_lines
from mindrlhf.records.response_writer import KeptResponses
from mindrlhf.records.rollout_dump import rollout_file, rollout_steps
from mindrlhf.records.rollout_parts import RolloutParts
from mindrlhf.records.rollout_record import read_rows
from mindrlhf.types import Experience, Prompt, Rollout, RolloutGroup


def experiences(step: int) -> list[Experience]:
    prompt = Prompt(step, np.array([1, 2], np.int32), {"ground_truth": "4"})
    log_probs = np.full(3, -0.5, np.float32)
    rollouts = tuple(Rollout(step, i, np.arange(3, dtype=np.int32), log_probs, log_probs, "eos", 0) for i in range(2))
    rewards = np.array([step, 0.5], np.float32)
    return [Experience(RolloutGroup(prompt, rollouts), rewards, {"gsm8k": rewards}, np.zeros(2, np.float32))]


def decode(ids) -> str:
    return " ".join(map(str, ids))


def test_both_forms_hold_every_step(tmp_path):
    record = RolloutParts(tmp_path / "r.mindrecord")
    kept = KeptResponses(tmp_path / "text", record, decode)
    for step in (1, 2, 3):
        kept.add(step, experiences(step))
    kept.close(finished=True)
    assert rollout_steps(tmp_path / "text") == [1, 2, 3]
    assert [row["reward"] for row in read_json_lines(rollout_file(tmp_path / "text", 3))] == [3.0, 0.5]
    assert [row["step"] for row in read_rows(tmp_path / "r.mindrecord")] == [1, 1, 2, 2, 3, 3]


def test_it_works_beside_the_caller_until_that_is_to_wait(tmp_path):
    caller, go = threading.get_ident(), threading.Event()
    seen = []

    def slow(ids):
        seen.append(threading.get_ident())
        assert go.wait(20)
        return ""

    kept = KeptResponses(tmp_path, None, slow)
    kept.add(1, experiences(1))
    assert rollout_steps(tmp_path) == [], "the caller is here before anything is written"
    go.set()
    kept.settle()
    assert rollout_steps(tmp_path) == [1]
    assert caller not in seen
    kept.close(finished=True)


@pytest.mark.parametrize("when", ["add", "settle", "close"])
def test_what_cannot_be_written_is_said_at_the_next_occasion(tmp_path, when):
    (tmp_path / "text").write_text("a file where the folder is to be")
    kept = KeptResponses(tmp_path / "text", None, decode)
    kept.add(1, experiences(1))
    then = {"add": lambda: kept.add(2, experiences(2)), "settle": kept.settle, "close": lambda: kept.close(False)}
    with pytest.raises((UserError, OSError), match="text"):
        then[when]()
    kept.close(finished=False)
