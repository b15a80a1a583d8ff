"""Source files: JSONL and JSON arrays, each mistake named by file and line, or item of an array."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindrlhf.data.source import read_source
from mindrlhf.errors import UserError

ROWS = st.lists(st.dictionaries(st.text(), st.text() | st.integers() | st.lists(st.text())), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, indent=st.none() | st.integers(0, 3), ascii_only=st.booleans())
def test_array_and_lines_give_the_same_rows(tmp_path_factory, rows, indent, ascii_only):
    folder = tmp_path_factory.mktemp("source")
    (folder / "a.json").write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")
    lines = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
    (folder / "a.jsonl").write_text(lines, encoding="utf-8")
    assert [row.values for row in read_source(folder / "a.json")] == rows
    assert [row.values for row in read_source(folder / "a.jsonl")] == rows


def test_places(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n{"a": 2}'.encode())
    assert [(row.values, row.where) for row in read_source(path)] == [
        ({"a": "x\u2028y"}, f"{path}, line 1"),
        ({"a": 2}, f"{path}, line 3"),
    ]
    path.write_text('[\n{"a": 1},\n\n{"a":\n2}, {"a": 3}\n]\n')
    assert [row.where for row in read_source(path)] == [f"{path}, item {number}" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"\n \n", "holds no rows"),
        (b"[]", "holds no rows"),
        (b'{"a": 1}\n{"a": \n', "line 2: not JSON"),
        (b'{"a": 1}\n[1]\n', r"line 2: should be a JSON object, and is \[1\]"),
        (b'[{"a": 1},\n 7]', "item 2: should be a JSON object, and is 7"),
        (b'[{"a": 1}\n {"a": 2}]', r"line 2: not JSON \(Expecting ',' delimiter, column 2"),
        (b'[{"a": 1},\n', "line 2: not JSON"),
        (b'[{"a": 1},]', "line 1: not JSON"),
        (b"[", "line 1: not JSON"),
        (b'[{"a": 1}]\n{"a": 2}', "line 2: not JSON .Extra data"),
        (b'{"a": 1}\n{"a": "\xff"}', "line 2: not UTF-8"),
        (b'{"a": 1}\n{"a": ' + b"[" * 100_000, "line 2: not JSON .lists and groups more than 200 levels deep"),
        (b'{"a": 1}\n{"a": ' + b"[" * 300 + b"]" * 300 + b"}", "line 2: not JSON .lists and groups more than 200"),
        (b'{"a": 1}\n{"a": ' + b"7" * 5000 + b"}", "line 2: not JSON .a number with thousands of digits"),
        (b'[{"a": 1},\n{"a": ' + b'{"b":' * 100_000, "line 1: not JSON .lists and groups more than 200"),
        (b'[{"a": 1},\n{"a": ' + b"7" * 5000 + b"}]", "line 1: not JSON .a number with thousands of digits"),
        (b'{"a": 1}\n{"a": {"b": "\\ud800"}}', "line 2: holds half of a surrogate pair"),
        (b'{"a": 1}\n{"a": 1, "b": {"c": 1, "c": 2}}', "line 2: not JSON .the key 'c' is there twice"),
        (b'{"data": [{"a": 1}, {"a": 2}]}', "is one object with its rows under 'data'; write the rows as a JSON array"),
        (b'[{"prompt": [{"role": "user", "content": "\\ud800"}]}]', "item 1: holds half of a surrogate pair"),
    ],
)
def test_bad_content(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=f"bad.json(, |: ){message}"):
        read_source(path)


def test_missing_file(tmp_path):
    with pytest.raises(UserError, match=r"none.jsonl: there is no such file"):
        read_source(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="has no split 'train' in parquet or JSONL files; there are no such files"):
        read_source(tmp_path)
