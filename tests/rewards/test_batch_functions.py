"""Reward functions in TRL's form, in reward processes: what they are given, and what a failure costs."""

import json

import numpy as np
import pytest
from reward_pools import runner, texts

from mindrlhf.data.source import SourceRow
from mindrlhf.data.tasks import parse_rows
from mindrlhf.data.tasks.task import prompt_fields
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import Sample

SOURCE = """
import asyncio
import time

calls = 0

def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def matching(prompts, completions, answer, level=None):
    global calls
    calls += 1
    return [{"score": float(a in c), "calls": calls, "level": float(l)} for c, a, l in zip(completions, answer, level)]

def told(prompts, completions, **columns):
    text = completions[0][0]["content"]
    assert prompts[0] == [{"role": "user", "content": "2 + 2?"}] and completions[0][0]["role"] == "assistant"
    assert completions[1] == "second" and prompts[1] == "Say second:"
    assert columns["answer"] == [4, None] and columns["tags"] == [["a", "b"], None] and columns["source"] == ["x", "y"]
    assert "prompt" not in columns and "json_fields" not in columns
    return [float(text), None]

async def slow(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [0.5] * len(completions)

async def one(prompt, completion, fields):
    return 2.0

def faulty(completions, **kwargs):
    if "raise" in completions:
        raise ValueError("no")
    if "hang" in completions:
        time.sleep(1000)
    if "short" in completions:
        return [1.0]
    if "number" in completions:
        return 3
    return [1.0 if text == "good" else text for text in completions]

def needs_ids(completion_ids, prompt_ids=None):
    return [sum(mine) + len(its) for mine, its in zip(completion_ids, prompt_ids)]

def needs_environments(environments, **kwargs):
    return [1.0] * len(environments)

def weighted(completions, *, weight=1.0):
    return [weight] * len(completions)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return tmp_path / "mine.py"


def rewards(table, name):
    return [None if np.isnan(value) else float(value) for value in table.by_function[name]]


def test_one_call_with_all_completions_and_columns(path):
    samples = [
        Sample("p", text, {"answer": answer, "level": "3"}) for text, answer in (("a 5", "5"), ("b", "5"), ("c 7", "7"))
    ]
    with runner(f"{path}:matching", f"{path}:length", weights=[1.0, 0.1]) as pool:
        table = pool.score(samples)
    assert rewards(table, "matching") == [1.0, 0.0, 1.0]
    assert rewards(table, "length") == [3.0, 1.0, 3.0]
    assert table.components["matching"]["calls"].tolist() == [1, 1, 1]
    np.testing.assert_allclose(table.totals, [1.3, 0.1, 1.3], rtol=1e-6)


def test_values_are_those_of_the_dataset(path):
    rows = [
        {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": 4, "tags": ["a", "b"], "source": "x"},
        {"prompt": "Say second:", "source": "y"},
    ]
    task, parsed = parse_rows([SourceRow(row, "row") for row in rows], None)
    fields = [prompt_fields(task.name, row) for row in parsed]
    assert all(isinstance(value, str) for row in fields for value in row.values())
    with runner(f"{path}:told") as pool:
        table = pool.score([Sample("rendered", "4", fields[0]), Sample("Say second:", "second", fields[1])])
    assert not table.errors["told"]
    assert rewards(table, "told") == [4.0, None]


def test_functions_that_are_awaited(path):
    with runner(f"{path}:slow", f"{path}:one") as pool:
        table = pool.score(texts("a", "b"))
    assert (rewards(table, "slow"), rewards(table, "one")) == ([0.5, 0.5], [2.0, 2.0])


def test_a_failure_costs_the_samples_of_its_call(path):
    with runner(f"{path}:faulty", timeout_s=1.0) as pool:
        assert rewards(pool.score(texts("good", "good")), "faulty") == [1.0, 1.0]
        for word, reason in {
            "raise": "ValueError: no (mine.py, line ",
            "short": "it returned list of 1 values for 2 completions",
            "number": "it returned int, and should return a list of 2 numbers",
            "hang": "it took longer than 1 s",
        }.items():
            table = pool.score(texts("good", word))
            assert rewards(table, "faulty") == [None, None]
            assert set(table.errors["faulty"]) == {0, 1}
            assert reason in table.errors["faulty"][0], table.errors["faulty"][0]
            assert sum(table.timeouts.values()) == (2 if word == "hang" else 0)
        table = pool.score(texts("good", "no number"))
        assert rewards(table, "faulty") == [1.0, None]
        assert table.errors["faulty"] == {1: "ValueError: it is str 'no number', and not a number"}


def test_no_samples(path):
    with runner(f"{path}:faulty") as pool:
        assert pool.score([]).totals.shape == (0,)


def test_a_parameter_that_is_not_given_here(path):
    with pytest.raises(
        UserError, match=r"takes environments, which is not given here; a call gives prompt, completion"
    ):
        runner(f"{path}:needs_environments")
    with pytest.raises(UserError, match=r"has no parameter 'wieght'; take it out of args"):
        runner(f"{path}:weighted", args={"wieght": 2.0})
    with runner(f"{path}:weighted", args={"weight": 2.0}) as pool:
        assert rewards(pool.score(texts("a")), "weighted") == [2.0]


def test_a_ground_truth_that_is_needed(tmp_path):
    (tmp_path / "truths.py").write_text(
        "def right(completions, ground_truth, **kwargs):\n    return [1.0] * len(completions)\n"
    )
    with runner(f"{tmp_path}/truths.py:right") as pool:
        assert pool.comparing == ("right",)


@pytest.mark.parametrize(
    "reply", ["[0,[1,2],0.0]", "[0,[[1.0,{},null]],0.0]", "[0,[[1.0],[1.0]],0.0]", "[0,[[1.0,{},5],[1.0,{},5]],0.0]"]
)
def test_forged_replies_are_no_answers(tmp_path, reply):
    """A function that writes to the pipe itself loses its samples, and not the job."""
    source = f"""
import os

def forger(completions, **kwargs):
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, {reply.encode()!r} + b"\\n")
        except OSError:
            continue
    return [1.0] * len(completions)
"""
    (tmp_path / "forger.py").write_text(source)
    with runner(f"{tmp_path}/forger.py:forger") as pool:
        table = pool.score(texts("a", "b"))
    assert rewards(table, "forger") == [None, None]
    assert json.dumps(table.errors["forger"][0])
