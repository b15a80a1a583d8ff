"""Reward functions of the calling program: called in this process, beside those in processes of their own."""

import asyncio
import os
import threading

import numpy as np
import pytest
from reward_pools import texts

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.errors import UserError
from mindrlhf.rewards.runner import RewardRunner


def pool(functions, *names, **settings):
    """A runner of callables under `python:NAME`, and of named functions."""
    own = {f"python:{name}": function for name, function in functions.items()}
    named = [{"name": name} if isinstance(name, str) else name for name in (*own, *names)]
    return RewardRunner(RewardSettings(functions=named, **settings), own)


def test_it_runs_here_and_only_here():
    def here(completions, **columns):
        return [float(os.getpid() == parent and threading.current_thread() is thread)] * len(completions)

    parent, thread = os.getpid(), threading.current_thread()
    with pool({"here": here}) as runner:
        assert runner.names == ("here",)
        assert runner._processes == []
        assert runner.score(texts("a", "b")).totals.tolist() == [1.0, 1.0]
        assert runner.score([]).totals.tolist() == []


def test_beside_a_function_in_a_process():
    def longer(completions, ground_truth, **columns):
        return [len(text) / 10 for text in completions]

    with pool({"longer": longer}, {"name": "gsm8k", "weight": 2.0}) as runner:
        assert runner.names == ("longer", "gsm8k")
        assert runner.comparing == ("longer", "gsm8k")
        table = runner.score(texts("#### 5", "#### 6"))
    assert table.by_function["gsm8k"].tolist() == [1.0, 0.0]
    np.testing.assert_allclose(table.totals, [2.6, 0.6], rtol=1e-6)


def test_forms_of_one_sample():
    with pool({"plain": lambda prompt, completion, fields: len(fields["ground_truth"] + completion)}) as runner:
        assert runner.score(texts("ab")).totals.tolist() == [3.0]


@pytest.mark.parametrize("in_a_loop", [False, True])
def test_awaitable_functions_run_at_the_same_time(in_a_loop):
    """Each waits for the other: one after the other they would not end. A notebook has a loop already."""
    met = [threading.Event(), threading.Event()]

    def waiting(mine, other):
        async def function(completions, **columns):
            met[mine].set()
            while not met[other].is_set():
                await asyncio.sleep(0.001)
            return [float(mine)] * len(completions)

        return function

    async def one(prompt, completion, fields):
        await asyncio.sleep(0)
        return 5.0

    def score():
        with pool({"first": waiting(0, 1), "second": waiting(1, 0), "one": one}) as runner:
            return runner.score(texts("a", "b"))

    async def within():
        return score()

    table = asyncio.run(within()) if in_a_loop else score()
    assert [table.by_function[name].tolist() for name in ("first", "second", "one")] == [[0, 0], [1, 1], [5, 5]]


def test_a_failure_costs_its_call():
    async def later(completions, **columns):
        raise KeyError("gone")

    def faulty(completions, **columns):
        if "raise" in completions:
            raise ValueError("no")
        return [None if text == "none" else text for text in completions]

    def one(prompt, completion, fields):
        return {"score": 1.0 / (completion != "raise"), "part": 2.0}

    with pool({"later": later, "faulty": faulty, "one": one}) as runner:
        table = runner.score(texts("raise", "b"))
        assert (
            table.errors["later"][1]
            == f"KeyError: 'gone' (test_in_process.py, line {later.__code__.co_firstlineno + 1})"
        )
        assert set(table.errors["faulty"]) == {0, 1}
        assert table.errors["one"][0].startswith("ZeroDivisionError")
        assert np.isnan(table.totals).all()  # each sample was lost by a function
        assert table.components["one"]["part"][1] == 2.0
        assert [failure.function for failure in table.first_failures] == ["later", "faulty", "one"]
        table = runner.score(texts("none", "text"))
        assert table.errors["faulty"] == {1: "ValueError: it is str 'text', and not a number"}


def test_an_interrupt_is_for_the_caller():
    def interrupted(completions, **columns):
        raise KeyboardInterrupt

    with pool({"interrupted": interrupted}) as runner, pytest.raises(KeyboardInterrupt):
        runner.score(texts("a"))


def test_a_parameter_that_is_not_given():
    with pytest.raises(UserError, match="reward 'games': the function takes environments, which is not given here"):
        pool({"games": lambda completions, environments: [0.0]})
    with pytest.raises(UserError, match="reward 'gsm8k': no call gives the function's parameter 'p'"):
        pool({"gsm8k": lambda p, c, f: 0.0})  # it has a shipped one's name, and is another
