"""The benchmark of conversations: its script of turns, and that both sides run with it."""

import sys

import jobs
import numpy as np
import pytest
from workers import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from conversations import FIRST, LAST, Script, scripted

from mindrlhf.rollout import slots

SCRIPT = ROOT / "benchmarks" / "conversations.py"
SMALL = "--hidden 32 --layers 2 --intermediate 48 --bpe-vocab 300 --dataset-size 2 --prompts 2 --num-generations 3"


def test_turns_end_where_the_script_says():
    script = Script.random(rows=5, calls=2, turn_tokens=(3, 6), answer=4)
    for numbers, calls in ((script.numbers(with_calls=True), 2), (script.numbers(with_calls=False), 0)):
        for row, length in zip(numbers, script.lengths, strict=True):
            ends = np.flatnonzero((row[:length] == FIRST) | (row[:length] == np.float32(LAST)))
            assert len(ends) == calls + 1
            assert ends[-1] == length - 1
            turns = np.diff([-1, *ends]) - np.array([0, 4, 4])[: calls + 1]  # behind a call are the answer's tokens
            assert calls == 0 or (turns.min() >= 3 and turns.max() <= 6)
    assert len(set(script.lengths)) > 1


def test_the_engine_draws_with_the_script_s_numbers():
    known, numbers = slots.uniform, np.arange(12, dtype=np.float32).reshape(6, 2)
    with scripted(numbers, samples=3):
        found = slots.uniform(0, 0, np.array([[1], [0]]), np.array([[2], [1]]), np.arange(2))
    np.testing.assert_array_equal(found, numbers[[5, 1]])
    assert slots.uniform is known


@pytest.mark.slow
def test_all_sides_run():
    flags = ("--rounds", "1", "--calls", "2", "--latency", "0.01", "--max-others", "99", "--")
    run = jobs.start([*flags, *SMALL.split()], script=SCRIPT)
    assert run.returncode == 0, run.stderr
    assert "6 conversations of 2 calls" in run.stdout
    assert "(! others were busy: 1 of 1 rounds count)" in run.stdout
    assert all(f"{side}: " in run.stdout for side in ("tools", "environment"))
