"""Conversion to MindRecord: real GSM8K, lengths and truncation, what is refused."""

import json

import numpy as np
import pytest

from mindrlhf.data.convert_problems import convert
from mindrlhf.data.mindrecord import read_columns, read_pairs, read_prompts
from mindrlhf.errors import UserError

ROWS = [
    {"question": "How many apples does Tom have left?", "answer": "3+4=7 #### 7"},
    {"question": "How many?", "answer": "1 #### 1"},
    {"question": "How many " + "apples " * 80, "answer": "9 #### 1,009"},
]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out" / "rows.mindrecord"


def plain(row):
    """The plain template, written out: question, GSM8K's instruction, a new line."""
    return f'{row["question"]}\nThink step by step, and finish with "#### " and the final number.\n'


def check_against_source(path, rows, tokenizer, render):
    """Every column of the file, derived again from the source rows one by one."""
    columns = read_columns(path)
    assert columns["row_index"] == list(range(len(rows)))
    for index, row in enumerate(rows):
        prompt = tokenizer.encode(render(row))
        answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        whole, pad = len(prompt) + len(answer), tokenizer.pad_token_id
        for name, ids in (("prompt_ids", prompt), ("pretrain_ids", prompt + answer)):
            column = columns[name][index]
            assert column.dtype == np.int64
            assert column.tolist() == ids + [pad] * (len(column) - len(ids))
        mask = columns["loss_mask"][index]
        assert mask.tolist() == [0] * len(prompt) + [1] * len(answer) + [0] * (len(mask) - whole)
        assert columns["prompt_length"][index] == len(prompt)
        assert columns["question"][index] == row["question"]
        assert columns["ground_truth"][index] == row["answer"].split("#### ")[-1].replace(",", "")
    assert {len(ids) for ids in columns["pretrain_ids"]} == {len(columns["loss_mask"][0])}
    return columns


def test_prompts_without_a_ground_truth(tmp_path, output, small):
    source = tmp_path / "open.jsonl"
    rows = [{"question": "Write a poem.", "style": "short"}, {"question": "2+2?", "ground_truth": 4}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = convert(source, output, small, task="fields", template="plain", progress=False)
    first, second = read_prompts(output)
    assert dict(first.fields) == {"task": "fields", "question": "Write a poem.", "style": "short"}
    assert second.fields["ground_truth"] == "4"
    assert "1 rows have no ground truth" in str(summary)


def test_columns(source, output, small):
    summary = convert(source, output, small, template="plain", max_prompt_length=200)
    columns = check_against_source(output, ROWS, small, plain)
    assert {len(ids) for ids in columns["prompt_ids"]} == {200}
    assert columns["task"] == ["gsm8k"] * 3
    lengths = columns["prompt_length"]
    longest = max(np.sum(mask) + length for mask, length in zip(columns["loss_mask"], lengths, strict=True))
    assert summary.seq_length == len(columns["pretrain_ids"][0]) == -(-longest // 64) * 64
    assert (summary.rows, summary.dropped, summary.truncated) == (3, 0, 0)
    assert summary.prompt_tokens == {50: sorted(lengths)[1], 90: max(lengths), 99: max(lengths), 100: max(lengths)}
    assert str(max(lengths)) in str(summary)


def test_gsm8k_test_split_with_the_qwen_template(shared, qwen, tmp_path):
    source, output = shared / "data" / "gsm8k" / "test.jsonl", tmp_path / "test.mindrecord"
    summary = convert(source, output, qwen)  # the defaults of the command line
    assert (summary.rows, summary.dropped, summary.truncated) == (1319, 0, 0)
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").split("\n") if line]

    def render(row):
        return (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
            f"{plain(row)[:-1]}<|im_end|>\n<|im_start|>assistant\n"
        )

    check_against_source(output, rows, qwen, render)
    prompts = read_prompts(output)
    assert [qwen.decode(prompt.token_ids) for prompt in prompts] == [render(row) for row in rows]
    assert all(
        qwen.decode(a) == row["answer"] + "<|endoftext|>" for (_, a), row in zip(read_pairs(output), rows, strict=True)
    )


@pytest.mark.slow
def test_gsm8k_train_split(shared, qwen, tmp_path):
    source, output = shared / "data" / "gsm8k" / "train.jsonl", tmp_path / "train.mindrecord"
    summary = convert(source, output, qwen)
    assert (summary.rows, summary.dropped, summary.truncated) == (7473, 0, 0)
    prompts = read_prompts(output)
    assert [prompt.id for prompt in prompts] == list(range(7473))
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").split("\n") if line]
    assert [prompt.fields["question"] for prompt in prompts] == [row["question"] for row in rows]


def test_json_array_gives_the_same_file_content(source, output, small, tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    convert(tmp_path / "rows.json", output, small, template="plain", max_prompt_length=200)
    check_against_source(output, ROWS, small, plain)


def test_truncation_error_names_the_row(source, output, small):
    tokens = len(small.encode(plain(ROWS[2])))
    with pytest.raises(
        UserError, match=rf"rows.jsonl, line 3: the prompt has {tokens} tokens, more than .* 110; raise it"
    ):
        convert(source, output, small, template="plain", max_prompt_length=110)
    assert not output.exists()


def test_truncation_drop(source, output, small):
    summary = convert(source, output, small, template="plain", max_prompt_length=110, truncation="drop")
    assert (summary.rows, summary.dropped, summary.truncated) == (2, 1, 0)
    assert [prompt.id for prompt in read_prompts(output)] == [0, 1]


@pytest.mark.parametrize(("truncation", "part"), [("left", slice(-110, None)), ("right", slice(None, 110))])
def test_truncation_of_the_prompt(source, output, small, truncation, part):
    summary = convert(source, output, small, template="plain", max_prompt_length=110, truncation=truncation)
    assert (summary.rows, summary.dropped, summary.truncated) == (3, 0, 1)
    prompts, pairs = read_prompts(output), read_pairs(output)
    assert prompts[0].token_ids.tolist() == small.encode(plain(ROWS[0]))
    assert prompts[2].token_ids.tolist() == pairs[2][0].tolist() == small.encode(plain(ROWS[2]))[part]
    assert small.decode(pairs[2][1]) == ROWS[2]["answer"] + "<|im_end|>"


def test_truncation_of_the_answer(source, output, small):
    prompt, answer = small.encode(plain(ROWS[0])), small.encode(ROWS[0]["answer"])
    limits = {"max_prompt_length": len(prompt), "seq_length": len(prompt) + len(answer) - 1, "template": "plain"}
    with pytest.raises(UserError, match=r"line 1: the prompt with its answer has .* more than --seq_length"):
        convert(source, output, small, **limits)
    assert convert(source, output, small, truncation="drop", **limits).rows == 1
    assert convert(source, output, small, truncation="left", **limits).truncated == 2
    assert read_pairs(output)[0][1].tolist() == answer[:-1]  # cut, so without an end token
    assert read_pairs(output)[0][0].tolist() == prompt


def test_everything_dropped(source, output, small):
    with pytest.raises(UserError, match="every row is too long"):
        convert(source, output, small, max_prompt_length=1, truncation="drop")


def test_countdown_rows_without_answers(output, small, tmp_path):
    source = tmp_path / "countdown.jsonl"
    source.write_text('{"nums": [3, 4], "target": 7}\n')
    summary = convert(source, output, small, task="countdown")
    assert summary.answer_tokens == {}
    assert "answer" in str(summary)
    assert json.loads(read_prompts(output)[0].fields["ground_truth"]) == {"target": 7, "numbers": [3, 4]}
    with pytest.raises(UserError, match="no row has a worked answer"):
        read_pairs(output)


def test_pad_token_and_system_prompt(source, output, small):
    convert(source, output, small, pad_token_id=3, system_prompt="Be short.", template="think")
    assert read_columns(output, ["prompt_ids"])["prompt_ids"][0][-1] == 3
    assert small.decode(read_prompts(output)[0].token_ids).startswith("<|im_start|>system\nBe short.<|im_end|>\n")


def test_empty_prompt(source, output, small, tmp_path):
    (tmp_path / "empty.jinja").write_text("{% if not question %}x{% endif %}\n")
    with pytest.raises(UserError, match=r"line 1: the prompt is empty; give it a text, or mend the template"):
        convert(source, output, small, template=str(tmp_path / "empty.jinja"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_prompt_length": 0}, "--max_prompt_length 0"),
        ({"seq_length": 512}, "--seq_length 512: holds the prompt and its answer"),
        ({"truncation": "middle"}, "--truncation middle: unknown"),
        ({"task": "gsm9k"}, "--dataset_type gsm9k: unknown"),
        ({"template": "chatml"}, "--template chatml: neither"),
    ],
)
def test_bad_settings(source, output, small, settings, message):
    with pytest.raises(UserError, match=message):
        convert(source, output, small, **settings)
    assert not output.parent.exists()


def test_malformed_row_leaves_the_earlier_output(source, output, small):
    convert(source, output, small, template="plain")
    before = {file.name: file.read_bytes() for file in output.parent.iterdir()}
    source.write_text(json.dumps(ROWS[0]) + '\n\n{"question": "q", "answer": "none"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl, line 3: not a gsm8k row: key 'answer' has no final answer"):
        convert(source, output, small, template="plain")
    assert {file.name: file.read_bytes() for file in output.parent.iterdir()} == before
