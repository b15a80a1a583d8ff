"""Replies that nobody asked for, and long ones: each call gets its own score, or none."""

import os
import time

import numpy as np
import psutil
from reward_pools import runner, texts


def test_a_function_that_forks_answers_once(faults):
    """Its child gets to no pipe, whether it returns, raises, exits or writes; and is not left either."""
    with runner(f"{faults}:forked", f"{faults}:process") as pool:
        for _ in range(2):
            table = pool.score(texts("returns", "raises", "exits", "answers", "c", "returns"))
            np.testing.assert_array_equal(table.by_function["forked"], np.ones(6, np.float32))
            assert table.errors == {"forked": {}, "process": {}}
        worker = psutil.Process(int(table.by_function["process"][0]))
        assert worker.children() == []


def test_a_process_that_answers_what_nobody_asked_is_replaced(faults):
    """No call gets another one's score; calls that the process did not come to are called again."""
    with runner(f"{faults}:twice", f"{faults}:process") as pool:
        table = pool.score(texts("now", "1", "2", "3"))
        assert np.isnan(table.by_function["twice"][0]) or table.by_function["twice"][0] == 9.0  # it forged its own
        np.testing.assert_array_equal(table.by_function["twice"][1:], np.float32([1, 2, 3]))
        before = pool.score(texts("later")).by_function["process"][0]
        time.sleep(0.5)
        table = pool.score(texts("4", "5"))
        np.testing.assert_array_equal(table.by_function["twice"], np.float32([4, 5]))
        assert before not in table.by_function["process"]
        table = pool.score(texts("later", "60", "6"))  # the second answer comes while 60 is under way
    np.testing.assert_array_equal(table.by_function["twice"], np.float32([0.5, 60, 6]))
    assert table.failures == {"twice": 0, "process": 0}


def test_long_replies_are_read_in_linear_time(faults, monkeypatch):
    """Of what is waiting for the end of its line, no byte is copied again with each further piece."""
    copied = 0

    class Piece(bytes):
        def __radd__(self, before):
            nonlocal copied
            copied += len(before)
            return bytes(before) + bytes(self)

    read = os.read
    monkeypatch.setattr("mindrlhf.workers.peer.READ_BYTES", 1 << 12)
    monkeypatch.setattr("mindrlhf.workers.peer.os.read", lambda *args: Piece(read(*args)))
    with runner(f"{faults}:many") as pool:
        table = pool.score(texts("10000"))
    assert len(table.components["many"]) == 10_000
    assert table.components["many"]["part 9999"] == [9999.0]
    assert copied < 10_000 * 30
