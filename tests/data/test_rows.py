"""Rows that a run converts itself: the prompts that `mindrlhf data` would have written."""

import json

import numpy as np
import pytest

from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.data.convert_problems import convert, convert_rows
from mindrlhf.data.source import given_rows
from mindrlhf.errors import UserError
from mindrlhf.run.training_data import read_problems

ROWS = {
    "gsm8k": [{"question": "2 + 3?", "answer": "It is 5. #### 5"}, {"question": "1?", "answer": "#### 1"}],
    "messages": [
        {"prompt": [{"role": "user", "content": "2 + 3?"}], "ground_truth": 5, "tags": ["a"], "none": None},
        {"prompt": [{"role": "user", "content": "1?"}], "ground_truth": 1, "tags": [], "none": None},
    ],
    "text": [{"prompt": "2 + 3 = ", "answer": "5", "level": 2}, {"prompt": "1 = ", "answer": "1", "level": 1}],
}


@pytest.fixture
def config():
    return GRPOSettings()


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_the_same_prompts_as_of_a_file(tmp_path, small, config, rows):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    convert(tmp_path / "rows.jsonl", tmp_path / "rows.mindrecord", small)
    expected = read_problems(tmp_path / "rows.mindrecord", small, config, {})
    for source in ("given", str(tmp_path / "rows.jsonl")):
        found = read_problems(source, small, config, {"given": rows})
        assert [(one.id, one.token_ids.tolist(), one.fields) for one in found] == [
            (one.id, one.token_ids.tolist(), one.fields) for one in expected
        ]
        assert found[0].token_ids.dtype == np.int32


def test_a_prompt_that_is_text_is_taken_as_it_is(small):
    (prompt, _) = convert_rows(given_rows(ROWS["text"], "rows"), small)
    assert small.decode(prompt.token_ids) == "2 + 3 = "
    assert prompt.fields["answer"] == "5"
    assert json.loads(prompt.fields["json_fields"]) == {"level": "json"}


def test_a_longer_prompt_loses_its_beginning(small):
    (prompt, _) = convert_rows(given_rows(ROWS["text"], "rows"), small, max_prompt_length=3)
    whole = small.encode("2 + 3 = ")
    assert prompt.token_ids.tolist() == whole[-3:]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "given: holds no rows"),
        ([{"prompt": "a"}, "text"], "given, row 1: should be a mapping of columns, and is 'text'"),
        ([{"prompt": "a"}, {"answer": "b"}], "given, row 1: not a fields row: key 'question' is missing"),
        ([{"prompt": " "}], "given, row 0: not a fields row: key 'prompt' should be text"),
    ],
)
def test_rows_that_are_none(small, config, rows, message):
    with pytest.raises(UserError, match=message):
        read_problems("given", small, config, {"given": rows})


def test_files_without_a_tokenizer(tmp_path, config):
    with pytest.raises(UserError, match=r"rows.jsonl: no tokenizer is given for its rows; use --tokenizer_path"):
        read_problems(tmp_path / "rows.jsonl", None, config, {})
