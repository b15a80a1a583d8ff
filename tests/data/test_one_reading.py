"""One reading of rows: which columns are the prompt, and how all others reach the reward functions."""

import json
import math
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.convert_problems import convert, convert_rows
from mindrlhf.data.mindrecord import PROMPT_SCHEMA, read_prompts, write_columns
from mindrlhf.data.source import given_rows, read_source
from mindrlhf.data.tasks import parse_rows
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import Logged, Sample, Steps, trl_arguments
from mindrlhf.rewards.columns import decode
from mindrlhf.rewards.registry import bind
from mindrlhf.run.training_data import read_problems

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2?"}]
WRITTEN = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
TEXT = "Q: 2+2?\nA:"
VERL = {"data_source": "mine", "reward_model": {"style": "rule", "ground_truth": 4}}
BESIDE = {
    "question": {"question": "other", "answer": "4"},
    "gsm8k": {"question": "other", "answer": "2+2 #### 4"},
    "ground_truth": {"question": "other", "ground_truth": 4},
    "countdown": {"nums": [1, 2], "target": 3},
    "multiplication": {"factors": [1, 2]},
    "game": {"question": "other", "environment": "e", "seed": 3},
    "verl": VERL,
    "questions": {"question": ["other"], "answer": None},
}


def prompts_of(rows, tokenizer):
    return convert_rows(given_rows(rows, "rows"), tokenizer)


def columns_of(prompts, *names):
    """The columns that a function of TRL's form is called with."""
    columns = trl_arguments([Sample("p", "c", prompt.fields) for prompt in prompts], Steps(), Logged(len(prompts)))
    return {name: columns[name] for name in names} if names else columns


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
@pytest.mark.parametrize(
    ("given", "written"),
    [
        ({"prompt": TALK}, WRITTEN),
        ({"messages": TALK}, WRITTEN),
        ({"prompt": TEXT}, TEXT),
        ({"prompt": TEXT, "messages": TALK}, TEXT),
        ({"prompt": None, "messages": TALK}, WRITTEN),
    ],
    ids=["prompt", "messages", "text", "both", "null"],
)
def test_a_prompt_of_its_own_is_the_prompt(small, beside, given, written):
    (prompt,) = prompts_of([beside | given], small)
    assert small.decode(prompt.token_ids) == written
    columns = columns_of([prompt])
    for name, value in beside.items():
        assert columns[name] == [value]


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        (BESIDE["gsm8k"], "4"),
        (BESIDE["ground_truth"], 4),
        (VERL, 4),
        ({"question": "q", "answer": "no mark", "ground_truth": [1, 2]}, [1, 2]),
        ({"question": "q", "answer": "2+2 #### 4", "ground_truth": 5.0}, 5.0),
    ],
)
def test_the_ground_truth_beside_a_prompt(small, row, truth):
    (prompt,) = prompts_of([row | {"prompt": TEXT}], small)
    found = columns_of([prompt], "ground_truth")["ground_truth"][0]
    assert (found, type(found)) == (truth, type(truth))


# value of the program -> value of the functions
VALUES = [
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.array([1, 2]), [1, 2]),
    (np.array([[1.5], [math.nan]]), [[1.5], [None]]),
    (np.str_("text"), "text"),
    (np.datetime64("2020-01-02T03:04:05"), datetime(2020, 1, 2, 3, 4, 5)),
    (np.timedelta64(90, "s"), timedelta(seconds=90)),
    (math.nan, None),
    (np.float64("nan"), None),
    (np.datetime64("NaT"), None),
    (Decimal("NaN"), None),
    (None, None),
    (math.inf, math.inf),
    (Decimal("1.10"), Decimal("1.10")),
    (date(2020, 1, 2), date(2020, 1, 2)),
    (datetime(2020, 1, 2, 3, tzinfo=timezone.utc), datetime(2020, 1, 2, 3, tzinfo=timezone.utc)),
    (time(3, 4, 5, 6), time(3, 4, 5, 6)),
    (timedelta(days=-1, microseconds=7), timedelta(days=-1, microseconds=7)),
    (b"\xff\x00", b"\xff\x00"),
    (10**30, 10**30),
    (False, False),
    ("", ""),
    ("18", "18"),
    ((1, "a"), [1, "a"]),
    ({"a": {"b": [Decimal("2.0"), math.nan, date(2020, 1, 1)]}, "$type": "x"},) * 2,
    ({1: "one", "two": 2},) * 2,
]
VALUES[-2] = (VALUES[-2][0], {"a": {"b": [Decimal("2.0"), None, date(2020, 1, 1)]}, "$type": "x"})
FORMS = {
    "fields": {"question": "q"},
    "text": {"prompt": "q"},
    "messages": {"messages": TALK},
    "gsm8k": {"question": "q", "answer": "#### 1"},
    "countdown": {"nums": [1, 2], "target": 3},
    "multiplication": {"factors": [2, 3]},
    "verl": {"prompt": TALK, **VERL},
    "game": {"question": "q", "environment": "e", "seed": 1},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_all_other_columns_reach_the_functions_with_their_types(small, tmp_path, monkeypatch, form):
    """From the calling program, and through a MindRecord."""
    row = form | {f"own_{number}": value for number, (value, _) in enumerate(VALUES)}
    rows = given_rows([row, form], "rows")
    monkeypatch.setattr("mindrlhf.data.convert_problems.read_source", lambda path: rows)
    convert("rows", tmp_path / "a.mindrecord", small, progress=False)
    for prompts in (prompts_of([row, form], small), read_prompts(tmp_path / "a.mindrecord")):
        columns = columns_of(prompts)
        for number, (_, expected) in enumerate(VALUES):
            found, absent = columns[f"own_{number}"]
            assert (found, type(found)) == (expected, type(expected))
            assert absent is None
        for name in set(form) - {"prompt", "messages"}:
            assert columns[name] == [form[name]] * 2
        assert all(isinstance(text, str) for prompt in prompts for text in prompt.fields.values())


def test_a_column_that_is_empty_in_all_rows_is_a_column_of_none(small):
    assert columns_of(prompts_of([{"prompt": "q", "level": None}], small), "level") == {"level": [None]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"x": {1, 2}}, "column 'x' is a set; give text, numbers, dates, lists or groups"),
        ({"x": [{"a": object()}]}, "column 'x' is a object; give text"),
        ({"x": ["\ud800"]}, "column 'x' holds half of a surrogate pair, which is no character; remove it"),
        ({"prompt": "\ud800"}, "column 'prompt' holds half of a surrogate pair"),
    ],
)
def test_an_object_without_a_form_is_refused(small, row, message):
    with pytest.raises(UserError, match=f"rows, row 0: {message}"):
        prompts_of([{"prompt": "q", **row}], small)


@pytest.mark.parametrize("truth", [42, [1, 2], {"target": ["a"]}, 0, False, 1.5, "42", Decimal("1.5")])
@pytest.mark.parametrize("form", ["verl", "fields", "messages"])
def test_a_ground_truth_keeps_its_type_in_all_forms(small, form, truth):
    row = {"prompt": TALK, "extra_info": {"index": 3, "parts": [1, None]}}
    named = {"reward_model": {"ground_truth": truth}} if form == "verl" else {"ground_truth": truth}
    (prompt,) = prompts_of([row | named], small)
    seen = []

    def verl(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((ground_truth, extra_info))
        return 0.0

    def pair(completion, ground_truth):
        seen.append((ground_truth, row["extra_info"]))
        return 0.0

    def batch(completions, ground_truth, extra_info):
        seen.append((ground_truth[0], extra_info[0]))
        return [0.0]

    for function in (verl, pair):
        bind(function, "f")("p", "c", prompt.fields)
    bind(batch, "f").of_batch([Sample("p", "c", prompt.fields)])
    for found, extra_info in seen:
        assert (found, type(found), extra_info) == (truth, type(truth), row["extra_info"])


def test_missing_values_of_files_are_none(small, tmp_path):
    """NaN as Python and pandas write it, and null: no row has a ground truth, so no completion can match it."""
    (tmp_path / "a.jsonl").write_text(
        '{"question": "q", "ground_truth": NaN}\n{"question": "q", "ground_truth": null}\n'
    )
    table = pyarrow.table({"question": ["q"] * 2, "ground_truth": pyarrow.array([math.nan, None], pyarrow.float64())})
    parquet.write_table(table, tmp_path / "a.parquet")
    for file in ("a.jsonl", "a.parquet"):
        for prompt in convert_rows(read_source(tmp_path / file), small):
            assert "ground_truth" not in prompt.fields


def test_a_mindrecord_of_earlier_versions(tmp_path):
    """Types were a list of the fields that are JSON, and a NaN was a ground truth."""

    def row(number, truth, extra):
        ids = {name: np.array([1, 2], np.int64) for name in ("prompt_ids", "pretrain_ids", "loss_mask")}
        texts = {"task": "fields", "question": "q", "ground_truth": truth, "extra": json.dumps(extra)}
        return {"row_index": number, **ids, "prompt_length": 2, **texts}

    rows = [
        row(0, "3", {"level": "5", "name": "7", "json_fields": '["level", "ground_truth"]'}),
        row(1, "NaN", {"json_fields": '["ground_truth"]'}),
        row(2, "4", {"extra_info": '{"index": 2}', "style": "rule", "data_source": "x"}),
    ]
    write_columns(tmp_path / "a.mindrecord", PROMPT_SCHEMA, rows)
    first, second, third = read_prompts(tmp_path / "a.mindrecord")
    assert decode(first.fields) == {"task": "fields", "question": "q", "ground_truth": 3, "level": 5, "name": "7"}
    assert "ground_truth" not in second.fields

    def index(data_source, solution_str, ground_truth, extra_info):
        return extra_info["index"] + float(ground_truth)

    assert bind(index, "f")("p", "c", third.fields) == 6


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"factors": [3, 4], "answer": "12"}, "multiplication"),
        ({"nums": [3, 4], "target": 7}, "countdown"),
        ({"numbers": [3, 4], "target": 7}, "countdown"),
        ({"task": "arithmetic", "question": "q", "answer": "#### 1"}, "arithmetic"),
        ({"task": "algebra", "question": "q", "answer": "#### 1"}, "gsm8k"),
        ({"task": ["x"], "question": "q", "answer": "#### 1"}, "gsm8k"),
        ({"question": "q", "answer": "#### 1"}, "gsm8k"),
        ({"question": "q", "ground_truth": "1"}, "fields"),
        ({"question": "q"}, "fields"),
        ({"prompt": "q", "data_source": "x"}, "fields"),
        ({"prompt": TALK, "data_source": "x"}, "verl"),
    ],
)
def test_tasks_are_recognised_by_columns(row, task):
    assert parse_rows(given_rows([row], "rows"), None)[0].name == task


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a"}, "not a fields row: key 'question' is missing .found: 'instruction'.; name its task or"),
        ({"question": "q", "answer": "four"}, "not a gsm8k row: key 'answer' has no final answer after ####; name its"),
        ({"messages": "text"}, "not a fields row: key 'messages' should be a list, and is text; call the key prompt"),
        ({"prompt": 3, "question": "q"}, "not a fields row: key 'prompt' should be a list of messages"),
    ],
)
def test_rows_that_no_task_reads(row, message):
    with pytest.raises(UserError, match=f"rows, row 0: {message}"):
        parse_rows(given_rows([row], "rows"), None)


def test_a_column_named_as_the_question_is_the_question(small, tmp_path):
    rows = [{"problem": "2 + 3?", "prompt": "unused", "answer": "5"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    fields = ("question=problem", "ground_truth=answer")
    convert(tmp_path / "a.jsonl", tmp_path / "a.mindrecord", small, fields=fields, template="plain", progress=False)
    (prompt,) = read_prompts(tmp_path / "a.mindrecord")
    assert small.decode(prompt.token_ids) == "2 + 3?\n"


@pytest.mark.parametrize("task", ["arithmetic", "calculator", "countdown", "multiplication", "wordle"])
def test_synthesized_rows_are_recognised(run_command, small, tmp_path, task):
    """A training reads them as `mindrlhf data` with their task does, also given as a folder."""
    sizes = ("--train_size", 5, "--test_size", 3, "--seed", 1)
    run_command("synthesize", "--task", task, "--output_dir", tmp_path, *sizes)
    name = task if task != "wordle" else "game"
    convert(tmp_path / "train.jsonl", tmp_path / "a.mindrecord", small, task=name, progress=False)
    expected = read_prompts(tmp_path / "a.mindrecord")
    for source in (tmp_path / "train.jsonl", tmp_path):
        found = read_problems(str(source), small, GRPOSettings(), {}, "train")
        assert [(one.token_ids.tolist(), one.fields) for one in found] == [
            (one.token_ids.tolist(), one.fields) for one in expected
        ]
        assert found[0].fields["task"] == name
