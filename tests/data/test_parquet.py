"""verl's parquet columns: written by pyarrow as verl's users have them, read into prompts, and written again."""

import json

import pyarrow
import pytest
from pyarrow import parquet

from mindrlhf.data.convert_problems import convert, convert_to_verl
from mindrlhf.data.mindrecord import read_pairs, read_prompts
from mindrlhf.data.parquet import read_parquet, write_parquet
from mindrlhf.data.source import given_rows, read_source
from mindrlhf.data.tasks import parse_rows
from mindrlhf.data.tasks.task import prompt_fields
from mindrlhf.errors import UserError
from mindrlhf.rewards.columns import value_of


def verl_row(index: int, system: str | None = None) -> dict:
    """As verl's GSM8K converter writes it, with a number as ground truth."""
    messages = [{"role": "system", "content": system}] if system else []
    return {
        "data_source": "openai/gsm8k",
        "prompt": [*messages, {"role": "user", "content": f"What is {index} + 1? Finish with ####."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
        "extra_info": {
            "split": "train",
            "index": index,
            "answer": f"{index}+1 #### {index + 1}",
            "question": "What?",
        },
    }


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [verl_row(index, system="Be brief." if index == 1 else None) for index in range(3)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_verls_file_becomes_prompts(file, small, tmp_path):
    output = tmp_path / "a.mindrecord"
    convert(file, output, small, task="verl", template="plain", progress=False)
    prompts = read_prompts(output)
    assert [small.decode(prompt.token_ids) for prompt in prompts] == [
        "What is 0 + 1? Finish with ####.\n",
        "Be brief.\n\nWhat is 1 + 1? Finish with ####.\n",
        "What is 2 + 1? Finish with ####.\n",
    ]
    fields = prompts[2].fields
    assert (fields["task"], fields["ground_truth"], fields["data_source"]) == ("verl", "3", "openai/gsm8k")
    assert '"index": 2' in fields["extra_info"]
    assert small.decode(read_pairs(output)[2][1], skip_special_tokens=True) == "2+1 #### 3"
    convert(file, output, small, task="verl", template="plain", system_prompt="", progress=False)
    assert small.decode(read_prompts(output)[1].token_ids) == "What is 1 + 1? Finish with ####.\n"


def test_several_files_become_one_dataset(file, small, tmp_path):
    output = tmp_path / "a.mindrecord"
    summary = convert([file, str(file)], output, small, task="verl", template="plain", progress=False)
    once = [prompt.fields["ground_truth"] for prompt in read_prompts(output)][:3]
    assert (summary.rows, [prompt.fields["ground_truth"] for prompt in read_prompts(output)]) == (6, once + once)


def test_what_is_written_is_what_was_read(file, tmp_path):
    again = tmp_path / "again.parquet"
    assert convert_to_verl(file, again, task="verl") == 3
    before, after = read_parquet(file), read_parquet(again)
    assert after == before
    assert list(after[0]) == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def test_a_task_is_written_for_verl(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "1+1 #### 2"}\n')
    path = tmp_path / "test.parquet"
    convert_to_verl(tmp_path / "rows.jsonl", path, split="test")
    table = parquet.read_table(path)  # by pyarrow alone
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    row = table.to_pylist()[0]
    asked = 'q Let\'s think step by step and output the final answer after "####".'
    assert row["prompt"] == [{"role": "user", "content": asked}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert row["extra_info"] == {"split": "test", "index": 0, "question": "q", "answer": "1+1 #### 2"}
    assert row["data_source"] == "openai/gsm8k"


def test_the_command_writes_and_reads(file, run_command, small, tmp_path, capsys):
    small.save(tmp_path)
    again = tmp_path / "val.parquet"
    run_command("data", "--file_path", file, "--output_path", again, "--dataset_type", "verl")
    assert f"{again}: 3 rows in verl's columns" in capsys.readouterr().out
    tokenizer = ("--tokenizer_path", tmp_path, "--template", "plain")
    output = tmp_path / "b.mindrecord"
    run_command("data", "--file_path", again, "--output_path", output, "--dataset_type", "verl", *tokenizer)
    assert len(read_prompts(output)) == 3


def test_any_columns_with_a_field_map(small, tmp_path):
    path = tmp_path / "own.parquet"
    write_parquet(path, [{"problem": "q", "meta": {"final": 7}, "level": 2}])
    output = tmp_path / "c.mindrecord"
    pairs = ("question=problem", "ground_truth=meta.final")
    convert(path, output, small, task="fields", template="plain", fields=pairs, progress=False)
    fields = read_prompts(output)[0].fields
    assert (fields["question"], fields["ground_truth"], fields["level"]) == ("q", "7", "2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 7}, "key 'prompt' should be a list of messages with at least one, and is 7"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "key 'prompt' should"),
        ({"prompt": [{"role": "user", "content": " "}]}, "key 'prompt': message 0 has no text"),
        ({"reward_model": "rule"}, "key 'reward_model' should be a group with a 'ground_truth', and is 'rule'"),
    ],
)
def test_malformed_rows(change, message):
    with pytest.raises(UserError, match=f"rows, row 0: not a verl row: {message}"):
        parse_rows(given_rows([verl_row(0) | change], "rows"), "verl")


@pytest.mark.parametrize("given", [{"style": "model"}, {"style": "model", "ground_truth": ""}, {}, None])
def test_a_row_without_a_ground_truth(given):
    task, (row,) = parse_rows(given_rows([verl_row(0) | {"reward_model": given}], "rows"), None)
    assert "ground_truth" not in prompt_fields(task.name, row)


def test_a_ground_truth_that_is_no_text_is_json():
    for truth, text in ((0, "0"), ({"target": 5, "numbers": [2, 3]}, '{"target": 5, "numbers": [2, 3]}')):
        task, (row,) = parse_rows(given_rows([verl_row(0) | {"reward_model": {"ground_truth": truth}}], "rows"), None)
        fields = prompt_fields(task.name, row)
        assert (fields["ground_truth"], value_of(fields, "ground_truth")) == (text, truth)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"none\.parquet: there is no such file"):
        read_source(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("text")
    with pytest.raises(UserError, match=r"bad\.parquet: is not a parquet file that can be read \("):
        read_source(tmp_path / "bad.parquet")
    parquet.write_table(pyarrow.table({"a": pyarrow.array([], pyarrow.int64())}), tmp_path / "empty.parquet")
    with pytest.raises(UserError, match=r"empty\.parquet: holds no rows"):
        read_source(tmp_path / "empty.parquet")


def test_other_columns_go_to_extra_info(tmp_path):
    row = {"question": "1 + 1?", "answer": "#### 2", "difficulty": 3, "tags": ["sum", "small"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    convert_to_verl(tmp_path / "rows.jsonl", tmp_path / "verl.parquet")
    (written,) = parquet.read_table(tmp_path / "verl.parquet").to_pylist()
    assert set(written) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    own = {"split": "train", "index": 0, "question": "1 + 1?", "answer": "#### 2"}
    assert written["extra_info"] == own | {"difficulty": 3, "tags": ["sum", "small"]}
