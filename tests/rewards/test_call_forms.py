"""Calls of reward functions by the names of their parameters: of one sample, and of a batch as TRL and verl call."""

import json

import numpy as np
import pytest
from reward_pools import runner, texts

from mindrlhf.configs.grpo import RewardSettings
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.runner import RewardRunner

SOURCE = """
import functools

def length(completion, prompt, fields):
    return len(completion)

def verl_order(solution_str, ground_truth, data_source, extra_info=None):
    return float(ground_truth in solution_str and data_source == "mine" and extra_info == {"index": 3})

def gsm8k_style(solution_str, ground_truth, method="strict", score=1.0):
    return score if ground_truth in solution_str else 0.0

def all_of_verl(solution_str, **kwargs):
    return float(sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "limit"])

def only_args(completion, fields, **args):
    return float(args == {"limit": 3})

def by_position(fields, completion, /, *, ground_truth):
    return float(fields["ground_truth"] == ground_truth and len(completion))

def wrapped(function):
    @functools.wraps(function)
    def inner(*args, **kwargs):
        return 10 + function(*args, **kwargs)
    return inner

@wrapped
def decorated(ground_truth, completion):
    return float(ground_truth in completion)

class Judge:
    def __call__(self, ground_truth, completion):
        return float(ground_truth in completion)

judge = Judge()
part = functools.partial(gsm8k_style, score=2.0)

def own_names(response, question, row):
    return len(response)

def nothing(**kwargs):
    return 1.0

def no_names(*args):
    return 1.0

def column(completion, answer):
    return 1.0

def mixed(completions, prompt):
    return [1.0]

def mixed_batches(prompts, solution_strs):
    return [1.0]

def typed(completion, ground_truth, fields):
    return float(ground_truth == fields["ground_truth"] == 42 and fields["tags"] == ["a"] and fields["level"] == "3")

def typed_verl(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth == {"target": ["Paris"]} and extra_info["index"] == 0)

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos)
    return [{"score": float(s == g and d == "mine"), "index": e["index"]} for d, s, g, e in rows]

def verl_batch_of_three(ground_truths, solution_strs, data_sources, limit=0):
    return [float(s == g) + limit for s, g in zip(solution_strs, ground_truths)]

def verl_batch_with_all(solution_strs, **kwargs):
    return [float(sorted(kwargs) == ["data_sources", "extra_infos", "ground_truths", "limit"])] * len(solution_strs)

def ids(completion_ids, **kwargs):
    return [float(sum(one) + len(kwargs["completions"])) for one in completion_ids]

def ids_of_both(prompt_ids, completion_ids):
    return [float(10 * sum(p) + sum(c)) for p, c in zip(prompt_ids, completion_ids)]

def kinds(completion_ids, **kwargs):
    return [float(type(one) is list and {type(token) for token in one} == {int}) for one in completion_ids]

def state(completions, trainer_state=None):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def epoch(completions, trainer_state):
    return [trainer_state.epoch] * len(completions)

async def logs(completions, log_metric=None, log_extra=None):
    log_metric("length", 2)
    log_metric("length", 4.0)
    log_extra("said", [text.upper() for text in completions])
    log_extra("number", list(range(len(completions))))
    return [1.0, None]

def logs_wrongly(completions, log_extra):
    log_extra("said", ["one"])
    return [1.0] * len(completions)

def lacks(completions, level):
    return [1.0] * len(completions)
"""
FIELDS = {"ground_truth": "x", "data_source": "mine", "extra_info": '{"index": 3}'}


@pytest.fixture
def path(tmp_path):
    (tmp_path / "my.py").write_text(SOURCE)
    return tmp_path / "my.py"


def scores(path, name, completions, fields=None, args=None):
    """What a function gives, in a process and in this one."""
    samples = [Sample("a prompt", text, fields or FIELDS) for text in completions]
    with runner(f"{path}:{name}", args=args) as pool:
        table = pool.score(samples)
    space: dict = {}
    exec(compile(path.read_text(), str(path), "exec"), space)
    own = RewardSettings(functions=[{"name": "python:f", "args": args or {}}])
    with RewardRunner(own, {"python:f": space[name]}) as pool:
        here = pool.score(samples)
    assert here.by_function["f"].tolist() == table.by_function[name].tolist(), here.errors
    assert not table.errors[name]
    return table.by_function[name].tolist()


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("length", None, [7, 4]),
        ("verl_order", None, [1, 0]),
        ("gsm8k_style", None, [1, 0]),
        ("gsm8k_style", {"score": 0.5}, [0.5, 0]),
        ("all_of_verl", {"limit": 3}, [1, 1]),
        ("only_args", {"limit": 3}, [1, 1]),
        ("by_position", None, [7, 4]),
        ("decorated", None, [11, 10]),
        ("judge", None, [1, 0]),
        ("part", None, [2, 0]),
    ],
)
def test_parameters_in_any_order(path, name, args, expected):
    assert scores(path, name, ["it is x", "here"], args=args) == expected


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "own_names",
            "no call gives the function's parameter 'response'; give it by args: {response: ...}; a call gives",
        ),
        ("nothing", "the function's parameters are none, and a call gives prompt, completion, fields, ground_truth"),
        ("no_names", "the function's parameters are none, and a call gives"),
        ("column", "parameter 'answer'; give it by args: {answer: ...}, or take a column as fields['answer']"),
        ("mixed", "the function takes prompt beside completions; a call gives"),
        ("mixed_batches", "the function takes prompts beside solution_strs; a call gives"),
    ],
)
def test_names_that_no_call_gives_are_refused(path, name, problem):
    with pytest.raises(UserError) as caught:
        runner(f"{path}:{name}")
    assert problem in str(caught.value)


def test_values_have_their_types(path):
    named = json.dumps(["ground_truth", "tags"])
    fields = {"ground_truth": "42", "tags": '["a"]', "level": "3", "json_fields": named}
    assert scores(path, "typed", ["a"], fields) == [1]
    truth = json.dumps({"target": ["Paris"]})
    for extra in ({"extra_info": '{"index": 0}'}, {"extra_info": '{"index": 0}', "json_fields": '["extra_info"]'}):
        names = json.dumps([*json.loads(extra.get("json_fields", "[]")), "ground_truth"])
        assert scores(path, "typed_verl", ["a"], {"ground_truth": truth, **extra, "json_fields": names}) == [1]
    with runner("gsm8k") as pool:  # a shipped function reads the text
        fields = {"ground_truth": "42", "json_fields": '["ground_truth"]'}
        assert pool.score([Sample("", "#### 42", fields)]).totals == [1]


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("verl_batch", None, [1, 0]),
        ("verl_batch_of_three", {"limit": 2}, [3, 2]),
        ("verl_batch_with_all", {"limit": 3}, [1, 1]),
    ],
)
def test_verl_s_batch_form(path, name, args, expected):
    assert scores(path, name, ["x", "y"], args=args) == expected
    with runner(f"{path}:{name}", args=args) as pool:
        assert pool.comparing == ((name,) if name != "verl_batch_with_all" else ())


def test_token_ids(path):
    samples = [Sample("a", "b", {}, np.array([1, 2], np.int32), np.array(own, np.int32)) for own in ([3, 4], [5])]
    with runner(f"{path}:ids", f"{path}:ids_of_both") as pool:
        table = pool.score(samples)
        assert table.by_function["ids"].tolist() == [9, 7]
        assert table.by_function["ids_of_both"].tolist() == [37, 35]
        table = pool.score(texts("a", "b"))
    space: dict = {}
    exec(path.read_text(), space)
    with RewardRunner(RewardSettings(functions=["python:f"]), {"python:f": space["kinds"]}) as pool:
        assert pool.score(samples).totals.tolist() == [1, 1]
    assert "its parameter completion_ids is not there: token ids are not known here" in table.errors["ids"][1]


def test_the_trainer_s_state(path):
    settings = RewardSettings(functions=[{"name": f"{path}:state"}, {"name": f"{path}:epoch"}])
    with RewardRunner(settings, total_steps=8) as pool:
        table = pool.score(texts("a"), 2)
    assert table.by_function["state"].tolist() == [0.25]
    assert "trainer_state has global_step and max_steps here, and no epoch" in table.errors["epoch"][0]


def test_what_a_batch_function_logs(path):
    with runner(f"{path}:logs", f"{path}:logs_wrongly", f"{path}:lacks") as pool:
        table = pool.score(texts("a", "b"))
    assert {name: values.tolist() for name, values in table.components["logs"].items()} == {
        "length": [3, 3],
        "number": [0, 1],
    }
    assert table.notes == [{"logs": {"said": "A"}}, {"logs": {"said": "B"}}]
    assert "log_extra got 1 values of 'said' for 2 completions" in table.errors["logs_wrongly"][0]
    assert "its parameter level is not there: the rows have ground_truth" in table.errors["lacks"][1]
