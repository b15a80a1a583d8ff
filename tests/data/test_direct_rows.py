"""Rows read at the start of a run: several files, other columns, and prompts that are too long."""

import json

import pytest

from mindrlhf.configs.loading import load_grpo_config
from mindrlhf.errors import UserError
from mindrlhf.run.training_data import read_problems

QUESTIONS = ("1+1?", "How many apples does Tom have left after he has given away all of them?", "2+3?")


@pytest.fixture
def rows(tmp_path):
    for name, questions in (("a", QUESTIONS[:2]), ("b", QUESTIONS[2:])):
        lines = [json.dumps({"question": text, "answer": "#### 2"}) for text in questions]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"


def read(source, tokenizer, *overrides):
    config = load_grpo_config(None, ["data.template=plain", *overrides])
    return [prompt.token_ids.tolist() for prompt in read_problems(source, tokenizer, config, {})]


def test_several_files_are_one_dataset(rows, small):
    whole = read(rows, small)
    assert len(whole) == 3
    assert read(rows.partition(",")[0], small) == whole[:2]


def test_a_file_whose_name_has_a_comma_is_one_file(rows, tmp_path, small):
    path = tmp_path / "a.jsonl,b.jsonl"
    path.write_text((tmp_path / "b.jsonl").read_text())
    assert len(read(path, small)) == 1


def test_long_prompts_are_cut_dropped_or_refused(rows, small):
    whole = read(rows, small)
    limit = len(whole[1]) - 1
    limited = (rows, small, f"data.max_prompt_length={limit}")
    assert read(*limited) == [whole[0], whole[1][1:], whole[2]]
    assert read(*limited, "data.truncation=right") == [whole[0], whole[1][:-1], whole[2]]
    assert read(*limited, "data.truncation=drop") == [whole[0], whole[2]]
    words = f"a.jsonl, line 2: the prompt has {limit + 1} tokens, more than data.max_prompt_length {limit}; raise it"
    with pytest.raises(UserError, match=words):
        read(*limited, "data.truncation=error")
    with pytest.raises(UserError, match=r"every prompt has more tokens than data\.max_prompt_length 1; raise it"):
        read(rows, small, "data.max_prompt_length=1", "data.truncation=drop")


def test_columns_of_other_names(tmp_path, small):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "solution": "2"}))
    (prompt,) = read(path, small, "data.fields=[question=problem, ground_truth=solution]")
    assert "1+1?" in small.decode(prompt)


@pytest.mark.parametrize(("column", "image"), [("images", [{"bytes": "iVBOR", "path": None}]), ("image", "a.png")])
def test_images_are_refused_where_text_is_read_alone(tmp_path, small, column, image):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": "<image>What?", column: one}) + "\n" for one in (None, image)))
    with pytest.raises(
        UserError, match=f"a.jsonl, line 2: has images in the column '{column}', and text is read alone"
    ):
        read(path, small)
