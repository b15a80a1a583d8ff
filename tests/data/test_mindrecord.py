"""MindRecord columns, prompts and pairs; MindRLHF's own files; files that are none."""

import contextlib
import json
import math
import os
import shutil
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pytest

from mindrlhf.data.mindrecord import (
    PROMPT_SCHEMA,
    read_columns,
    read_pairs,
    read_prompts,
    read_schema,
    write_columns,
)
from mindrlhf.errors import UserError

SCHEMA = {
    "ids": {"type": "int32", "shape": [-1]},
    "scores": {"type": "float32", "shape": [-1]},
    "text": {"type": "string"},
    "reward": {"type": "float64"},
    "row": {"type": "int64"},
}


def sample_row(row):
    rng = np.random.default_rng(row)
    return {
        "ids": rng.integers(-(2**31), 2**31 - 1, row % 5).astype(np.int32),
        "scores": np.append(rng.normal(size=row % 3), np.nan).astype(np.float32),
        "text": f"row {row} 'é\"\n\0中" if row % 2 else "",
        "reward": math.nan if row % 7 == 0 else row / 3,
        "row": row - 2**40,
    }


def prompt_row(row, prompt, answer, width=12, **text):
    """A row as `mindrlhf data` writes it, with pad 0."""

    def padded(ids):
        return np.array(ids + [0] * (width - len(ids)), np.int64)

    fields = {"task": "t", "question": "q", "ground_truth": "g", "extra": "{}"} | text
    return {
        "row_index": row,
        "prompt_length": len(prompt),
        "prompt_ids": padded(prompt),
        "pretrain_ids": padded(prompt + answer),
        "loss_mask": padded([0] * len(prompt) + [1] * len(answer)),
        **fields,
    }


def write_with_mindspore(path, schema, rows):
    """A MindRecord written without our code."""
    from mindspore.mindrecord import FileWriter

    writer = FileWriter(str(path), shard_num=1)
    writer.add_schema(schema, "test")
    if rows:
        writer.write_raw_data(rows)
    writer.commit()


def snapshot(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_columns_round_trip(tmp_path):
    path = tmp_path / "new" / "a.mindrecord"
    rows = [sample_row(row) for row in range(700)]  # several writes
    assert write_columns(path, SCHEMA, iter(rows)) == 700
    assert sorted(file.name for file in path.parent.iterdir()) == ["a.mindrecord", "a.mindrecord.db"]
    columns = read_columns(path)
    assert set(columns) == set(SCHEMA)
    for index, row in enumerate(rows):
        for name in ("ids", "scores"):
            assert columns[name][index].dtype == row[name].dtype
            np.testing.assert_array_equal(columns[name][index], row[name])
        assert (columns["text"][index], columns["row"][index]) == (row["text"], row["row"])
        np.testing.assert_equal(columns["reward"][index], row["reward"])
    assert list(read_columns(path, ["row"])) == ["row"]
    assert read_schema(path)["ids"] == {"type": "int32", "shape": [-1]}


def test_mindspore_reads_what_we_write(tmp_path):
    from mindspore.mindrecord import FileReader

    path = tmp_path / "a.mindrecord"
    write_columns(path, {"ids": SCHEMA["ids"]}, [{"ids": np.array([row], np.int32)} for row in range(3)])
    reader = FileReader(str(path))
    assert [row["ids"].tolist() for row in reader.get_next()] == [[0], [1], [2]]
    reader.close()


def test_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "a.mindrecord"
    write_columns(path, SCHEMA, [sample_row(1)])
    before = snapshot(tmp_path)

    def interrupted():
        yield from (sample_row(row) for row in range(300))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_columns(path, SCHEMA, interrupted())
    with pytest.raises(UserError, match="there are no rows to write"):
        write_columns(path, SCHEMA, [])
    with pytest.raises(ValueError, match=r"1 of rows 0\.\.1 do not fit the schema"):
        write_columns(path, SCHEMA, [sample_row(1), sample_row(2) | {"ids": np.zeros(2, np.int64)}])
    assert snapshot(tmp_path) == before
    write_columns(path, SCHEMA, [sample_row(2), sample_row(3)])
    assert len(read_columns(path)["row"]) == 2


def test_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be written"):
        write_columns(tmp_path / "file" / "a.mindrecord", SCHEMA, [sample_row(1)])
    with pytest.raises(UserError, match=r"a:b: cannot be written as a MindRecord"):
        write_columns(tmp_path / "a:b", SCHEMA, [sample_row(1)])
    (tmp_path / "a.db").mkdir()
    with pytest.raises(UserError, match=r"a\.db: is a folder"):
        write_columns(tmp_path / "a", SCHEMA, [sample_row(1)])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.db", "file"]


def test_missing_columns(tmp_path):
    path = tmp_path / "a.mindrecord"
    write_columns(path, SCHEMA, [sample_row(1)])
    with pytest.raises(UserError, match=r"a.mindrecord: has no column answer; it has .*ids.*row"):
        read_columns(path, ["ids", "answer"])
    with pytest.raises(UserError, match=r"has no column prompt_ids, prompt_length, .*ground_truth, extra; it has "):
        read_prompts(path)
    with pytest.raises(UserError, match=r"has no column pretrain_ids, loss_mask, prompt_length; it has "):
        read_pairs(path)


def test_files_that_are_no_mindrecord(tmp_path, capfd):
    with pytest.raises(UserError, match=r"none.mindrecord: no such MindRecord file"):
        read_columns(tmp_path / "none.mindrecord")
    for name, content in (("text.mindrecord", b'{"question": "q"}\n' * 9), ("empty.mindrecord", b"")):
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.db").write_bytes(content)
        with pytest.raises(UserError, match=f"{name}: is not a MindRecord file"):
            read_columns(tmp_path / name)
    assert capfd.readouterr() == ("", "")  # nothing of MindSpore's own log


def test_damaged_mindrecord(tmp_path):
    path = tmp_path / "a.mindrecord"
    write_columns(path, SCHEMA, [sample_row(row) for row in range(10)])
    data, index = path.read_bytes(), (tmp_path / "a.mindrecord.db").read_bytes()
    for kept in (1000, 17_000_000):  # inside the header, inside the pages
        path.write_bytes(data[:kept])
        with pytest.raises(UserError, match=r"^[^\n]*a.mindrecord: is damaged or cut short; write it again\.$"):
            read_columns(path)
    path.write_bytes(data)
    for broken in (b"no index", index[:4000]):
        (tmp_path / "a.mindrecord.db").write_bytes(broken)
        with pytest.raises(UserError, match=r"a.mindrecord.db: is not the index of a MindRecord file"):
            read_columns(path)
    (tmp_path / "a.mindrecord.db").unlink()
    with pytest.raises(UserError, match=r"its index a.mindrecord.db is not beside it"):
        read_columns(path)


def test_renamed_mindrecord(tmp_path):
    write_columns(tmp_path / "a", SCHEMA, [sample_row(1)])
    for suffix in ("", ".db"):  # beside the original, so that MindSpore would read that instead
        shutil.copy(tmp_path / f"a{suffix}", tmp_path / f"b{suffix}")
    with pytest.raises(UserError, match=r"b: was made as a, and a MindRecord cannot be renamed"):
        read_columns(tmp_path / "b")


def test_mindrecord_without_rows(tmp_path):
    path = tmp_path / "a.mindrecord"
    write_with_mindspore(path, PROMPT_SCHEMA, [])
    with pytest.raises(UserError, match="holds no rows"):
        read_prompts(path)


def test_prompts_and_pairs(tmp_path):
    path = tmp_path / "a.mindrecord"
    rows = [
        prompt_row(4, [5, 6, 0], [7, 9], task="gsm8k", question="Q?", ground_truth="72", extra='{"level": "1"}'),
        prompt_row(9, [8], []),
    ]
    write_columns(path, PROMPT_SCHEMA, rows)
    first, second = read_prompts(path)
    assert (first.id, first.token_ids.tolist(), first.token_ids.dtype) == (4, [5, 6, 0], np.int32)
    assert first.fields == {"task": "gsm8k", "question": "Q?", "ground_truth": "72", "level": "1"}
    assert (second.id, second.token_ids.tolist()) == (9, [8])
    ((prompt_ids, answer_ids),) = read_pairs(path)  # the second row has no answer
    assert (prompt_ids.tolist(), answer_ids.tolist()) == ([5, 6, 0], [7, 9])
    assert prompt_ids.dtype == answer_ids.dtype == np.int32


def test_pairs_without_any_answer(tmp_path):
    write_columns(tmp_path / "a", PROMPT_SCHEMA, [prompt_row(0, [5], [])])
    with pytest.raises(UserError, match="no row has a worked answer"):
        read_pairs(tmp_path / "a")


@pytest.fixture
def mindrlhf_file(small, tmp_path):
    """Writes three columns as MindRLHF does: padding also in loss_mask, no lengths, no text."""

    def write(prompts, solutions):
        pad = small.pad_token_id

        def padded(ids, width=96):
            return np.array(ids + [pad] * (width - len(ids)), np.int64)

        rows = [
            {
                "prompt_ids": padded(small.encode(prompt)),
                "pretrain_ids": padded(small.encode(solution)),
                "loss_mask": padded([1] * len(small.encode(solution))),
            }
            for prompt, solution in zip(prompts, solutions, strict=True)
        ]
        schema = {column: {"type": "int64", "shape": [-1]} for column in ("prompt_ids", "pretrain_ids", "loss_mask")}
        write_with_mindspore(tmp_path / "old.mindrecord", schema, rows)
        return tmp_path / "old.mindrecord"

    return write


def test_mindrlhf_file_with_the_question_in_the_solution(mindrlhf_file, small):
    # The first pair merges over the border: " apples" is one token of the whole and none of the prompt.
    prompts = ["How many app", "What is #### 2+2?"]
    solutions = ["les does Tom have left?\n3+4=7 #### 1,007", " four"]
    assert small.encode(prompts[0] + solutions[0])[: len(small.encode(prompts[0]))] != small.encode(prompts[0])
    path = mindrlhf_file(prompts, [prompt + solution for prompt, solution in zip(prompts, solutions, strict=True)])
    read = read_prompts(path, small)
    assert [prompt.id for prompt in read] == [0, 1]
    assert [prompt.token_ids.tolist() for prompt in read] == [small.encode(prompt) for prompt in prompts]
    assert [prompt.fields["question"] for prompt in read] == prompts
    assert [prompt.fields["ground_truth"] for prompt in read] == ["1007", "four"]
    for (prompt_ids, answer_ids), prompt, solution in zip(read_pairs(path, small), prompts, solutions, strict=True):
        assert small.decode(prompt_ids) == prompt
        assert small.decode(answer_ids) == solution + "<|im_end|>"


def test_mindrlhf_file_with_the_final_answer_only(mindrlhf_file, small):
    path = mindrlhf_file(["How many apples?"], ["72<|im_end|>"])
    assert read_prompts(path, small)[0].fields["ground_truth"] == "72"
    assert small.decode(read_pairs(path, small)[0][1]) == "72<|im_end|>"


def test_mindrlhf_file_needs_a_tokenizer(mindrlhf_file, small):
    path = mindrlhf_file(["Tom", ""], ["1", "2"])
    with pytest.raises(UserError, match="was made by MindRLHF and holds token ids only"):
        read_prompts(path)
    with pytest.raises(UserError, match="row 1: the prompt is nothing but padding"):
        read_pairs(path, small)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": "[" * 300 + "]" * 300}, "more than 200 levels"),
        ({"extra": "[1]"}, "unsupported operand"),
        ({"extra": '{"a": 1}'}, "a field is not text"),
        ({"prompt_length": 0}, "prompt_length is 0 of 12"),
        ({"prompt_length": 99}, "prompt_length is 99 of 12"),
        ({"prompt_ids": np.array([-1] * 12)}, "a token id is not between"),
        ({"prompt_ids": np.array([2**40] * 12)}, "a token id is not between"),
    ],
)
def test_prompts_that_nothing_wrote_are_refused(tmp_path, changes, message):
    path = tmp_path / "x.mindrecord"
    write_columns(path, PROMPT_SCHEMA, [prompt_row(0, [1, 2], [3]), prompt_row(1, [1, 2], [3]) | changes])
    with pytest.raises(UserError, match=r"x\.mindrecord, row 1: is no prompt that `mindrlhf data` wrote") as caught:
        read_prompts(path)
    assert message in str(caught.value)


def test_an_index_without_a_name_is_refused(tmp_path):
    path = tmp_path / "x.mindrecord"
    write_columns(path, PROMPT_SCHEMA, [prompt_row(0, [1, 2], [3])])
    with contextlib.closing(sqlite3.connect(f"{path}.db")) as connection, connection:
        connection.execute("UPDATE SHARD_NAME SET NAME = X'00FF'")
    with pytest.raises(UserError, match="was made as b"):
        read_prompts(path)


@pytest.mark.parametrize("suffix", ["", ".db"])
def test_files_that_may_not_be_read_are_named(tmp_path, monkeypatch, suffix):
    path = tmp_path / "x.mindrecord"
    write_columns(path, PROMPT_SCHEMA, [prompt_row(0, [1, 2], [3])])
    file, opened = tmp_path / f"x.mindrecord{suffix}", Path.open

    def refused(self, *arguments, **named):  # root may read everything, whatever the mode says
        if self == file:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(UserError, match=rf"x\.mindrecord{suffix}: cannot be read \(Permission denied\)"):
        read_schema(path)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "nonsense"},
        {"type": 5},
        {"type": "string", "shape": [-1]},
        {"type": "int32", "shape": ["x"]},
        {"type": "int32", "shape": [-5]},
        {"type": "int64", "shape": [10**12]},
    ],
)
def test_a_schema_that_nothing_wrote_is_a_sentence(tmp_path, change):
    """The header is longer than its JSON text, so that a crafted schema of any length fits."""
    path = tmp_path / "x.mindrecord"
    write_columns(path, PROMPT_SCHEMA, [prompt_row(row, [1, 2], [3]) for row in range(4)])
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    (schema,) = header["schema"]
    schema["schema"]["prompt_ids"] = change
    crafted = json.dumps(header).encode()
    path.write_bytes(len(crafted).to_bytes(8, "little") + crafted + data[8 + len(crafted) :])
    with pytest.raises(UserError, match=r"^[^\n]*x\.mindrecord[^\n]*$"):
        read_prompts(path)


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_mode_is_as_the_umask_says(tmp_path, mask):
    earlier = os.umask(mask)
    try:
        write_columns(tmp_path / "a.mindrecord", {"x": {"type": "int64"}}, [{"x": 1}])
    finally:
        os.umask(earlier)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("a.mindrecord", "a.mindrecord.db"), 0o666 & ~mask)
