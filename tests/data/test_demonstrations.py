"""Demonstrations of files: conversations of JSONL and parquet, and MindRecords as before."""

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from sample_conversations import MESSAGES, TOOLS, drawn_text

from mindrlhf.data.convert_problems import convert
from mindrlhf.data.demonstrations import read_demonstrations
from mindrlhf.data.mindrecord import read_pairs
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.errors import UserError

PLAIN = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name, array in vars(other).items():
            np.testing.assert_array_equal(getattr(one, name), array, err_msg=name)


def test_rows_with_tools_and_without(qwen, tmp_path):
    """`tools` as a list or as JSON text; the same from parquet, whose columns fill missing keys with nulls."""
    rows = [{"messages": MESSAGES, "tools": TOOLS}, {"messages": PLAIN, "source": "x"}]
    found = read_demonstrations(write(tmp_path / "a.jsonl", *rows), qwen)
    template = TurnTemplate(qwen)
    assert_same(found, [template.conversation(MESSAGES, TOOLS), template.conversation(PLAIN)])
    assert drawn_text(qwen, found[1]) == "2<|im_end|>"
    text = write(tmp_path / "b.jsonl", rows[0] | {"tools": json.dumps(TOOLS)}, rows[1])
    assert_same(read_demonstrations(text, qwen), found)
    parquet.write_table(pyarrow.Table.from_pylist([rows[0] | {"source": None}, rows[1]]), tmp_path / "c.parquet")
    assert_same(read_demonstrations(tmp_path / "c.parquet", qwen), found)


@pytest.mark.parametrize("arguments", [{"code": "print(1+1)"}, '{"code": "print(1+1)"}'])
@pytest.mark.parametrize("tool_format", ["hermes", "retool"])
def test_retool_s_published_rows(small, tmp_path, tool_format, arguments):
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": arguments}}
    messages = [
        PLAIN[0],
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "So \\boxed{2}."},
    ]
    parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": messages, "tools": TOOLS}]), tmp_path / "train-00000.parquet"
    )
    (found,) = read_demonstrations(tmp_path / "train-00000.parquet", small, tool_format)
    learnt = drawn_text(small, found)
    assert learnt.count("print(1+1)") == 1
    assert learnt.startswith("Let me see.\n<")
    assert learnt.endswith("So \\boxed{2}.<|im_end|>")
    context = small.decode(found.response_ids[~found.sampled])
    if tool_format == "retool":
        assert context == "\n<interpreter>\n2\n</interpreter>\n"
    else:
        assert context == "\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"


def test_a_mindrecord_is_read_as_before(small, tmp_path):
    source = write(tmp_path / "a.jsonl", {"question": "1+1?", "answer": "1+1=2\n#### 2"})
    convert(source, tmp_path / "a.mindrecord", small, progress=False)
    (found,) = read_demonstrations(tmp_path / "a.mindrecord", small)
    ((prompt, answer),) = read_pairs(tmp_path / "a.mindrecord")
    np.testing.assert_array_equal(found.prompt_ids, prompt)
    np.testing.assert_array_equal(found.response_ids, answer)
    assert found.sampled.all()


def test_long_rows_lose_their_end(small, tmp_path, caplog):
    file = write(tmp_path / "a.jsonl", {"messages": PLAIN}, {"messages": MESSAGES[1:]})
    short, long = read_demonstrations(file, small)
    size = len(long.prompt_ids) + 7
    assert len(short.prompt_ids) + len(short.response_ids) <= size
    first, second = read_demonstrations(file, small, max_length=size)
    assert_same([first], [short])
    np.testing.assert_array_equal(second.response_ids, long.response_ids[:7])
    np.testing.assert_array_equal(second.sampled, long.sampled[:7])
    assert not caplog.messages
    least = len(short.prompt_ids) + 1
    assert len(read_demonstrations(file, small, max_length=least)) == 1
    assert caplog.messages == [f"{file}: 1 of 2 rows are left out, whose prompts fill data.max_length {least}"]
    with pytest.raises(UserError, match=r"no row has an answer within data\.max_length 2"):
        read_demonstrations(file, small, max_length=2)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x"}, "line 2: has no answer to imitate; give one, messages, or prompt and completion"),
        ({"other": "x"}, "line 2: needs messages, prompt and completion, text, or a problem with an answer, and has o"),
        (
            {"conversations": [{"from": "system", "value": "a"}, {"from": "human", "value": "b"}], "system": "c"},
            "line 2: the row has a system prompt, and its conversation begins with another one; leave one out",
        ),
        (
            {"messages": [*PLAIN, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{x}"}]}]},
            r'line 2: the "arguments" of f are text, and not JSON \(Expecting',
        ),
        ({"conversations": "x"}, "line 2: conversations should be a list, and is 'x'"),
        (
            {"conversations": [{"from": "function_call", "value": "f"}]},
            "line 2: conversations: message 0 is from 'func",
        ),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "line 2: history is not read beside instruct"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "line 2: messages: message 0 has a part of"),
        ({"messages": PLAIN, "images": ["a.png"]}, "line 2: has images in the column 'images', and text is read alone"),
        ({"messages": PLAIN[:1]}, "line 2: .* one of the assistant"),
        ({"messages": PLAIN, "tools": "{"}, "line 2: Expecting"),
        ({"messages": PLAIN, "tools": {"name": "f"}}, "line 2: tools should be a list"),
    ],
)
def test_rows_that_are_refused(small, tmp_path, row, reason):
    with pytest.raises(UserError, match=rf"a\.jsonl, {reason}"):
        read_demonstrations(write(tmp_path / "a.jsonl", {"messages": PLAIN}, row), small)


def test_a_format_that_is_not_known(small, tmp_path):
    with pytest.raises(UserError, match="hermes, retool"):
        read_demonstrations(write(tmp_path / "a.jsonl", {"messages": PLAIN}), small, "xml")


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_whole_texts_are_answers_to_their_first_token(small, end):
    """Control tokens in them count; an end token comes once."""
    written = f"<|im_start|>user\n2 + 3 =<|im_end|>\n<|im_start|>assistant\n5{end}"
    (turns,) = read_demonstrations("rows", small, given=[{"text": written}])
    ids = [*small.encode(written.removesuffix("<|im_end|>")), small.eos_token_id]
    assert [*turns.prompt_ids.tolist(), *turns.response_ids.tolist()] == ids
    assert len(turns.prompt_ids) == 1
    assert turns.sampled.all()
    with pytest.raises(UserError, match="row 0: the text is empty"):
        read_demonstrations("rows", small, given=[{"text": ""}])


def test_prompts_with_completions(tmp_path, small):
    """As messages they are the conversation; as texts their tokens, with an end token."""
    prompt, completion = [{"role": "user", "content": "2 + 3 ="}], [{"role": "assistant", "content": "5"}]
    rows = [{"messages": prompt + completion}, {"prompt": prompt, "completion": completion}]
    whole, parts = read_demonstrations("rows", small, given=rows)
    assert_same([parts], [whole])
    (text,) = read_demonstrations(write(tmp_path / "a.jsonl", {"prompt": "2 + 3 =", "completion": " 5"}), small)
    assert text.prompt_ids.tolist() == small.encode("2 + 3 =")
    assert text.response_ids.tolist() == [*small.encode(" 5"), small.eos_token_id]
    assert text.sampled.all()
    with pytest.raises(UserError, match=r"row 0: needs messages, prompt and completion, text, .* and has note"):
        read_demonstrations("rows", small, given=[{"note": "2 + 3 = 5"}])
    with pytest.raises(UserError, match="row 0: the prompt has an assistant's turn"):
        read_demonstrations("rows", small, given=[{"prompt": prompt + completion, "completion": completion}])
