"""Reading YAML: numbers, line numbers, base_config chains, and what is refused."""

import pytest

from mindrlhf.configs.yaml_file import NOT_YAML, parse, read_chain, read_yaml
from mindrlhf.errors import UserError


def written(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_numbers_in_exponent_form_are_numbers(tmp_path):
    layer = read_yaml(written(tmp_path, "a.yaml", "a: 1e-6\nb: 1.e-8\nc: 5E3\nd: 1e-6x\ne: '1e-6'\nf: 12\ng: True\n"))
    assert layer.values == {"a": 1e-6, "b": 1e-8, "c": 5000.0, "d": "1e-6x", "e": "1e-6", "f": 12, "g": True}
    assert parse("-2.5e-3")[0] == -0.0025
    assert parse("[1, a]")[0] == [1, "a"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0100", 100), ("007", 7), ("-010", -10), ("089", 89), ("1_000", 1000), ("0x10", 16), ("0b101", 5)),
        *(("1:30", "1:30"), ("1:30.5", "1:30.5"), ("-12:30:45", "-12:30:45"), ("0o17", "0o17")),
        *(("2024-01-01", "2024-01-01"), ("2024-1-1 10:00:00", "2024-1-1 10:00:00"), ("2024-13-45", "2024-13-45")),
        *(("1_0.5", 10.5), ("010.5", 10.5), (".5e-6", 5e-7), ("-.inf", float("-inf")), ("1.", 1.0), ("1e", "1e")),
    ],
)
def test_a_number_is_the_one_that_people_read(text, value):
    """YAML 1.1, PyYAML's, reads octal numbers and numbers of base 60 (0100 is 64, 1:30 is 90)."""
    assert parse(text)[0] == value
    assert type(parse(text)[0]) is type(value)
    assert parse(f"[{{a: [{text}]}}]")[0] == [{"a": [value]}]


def test_every_key_knows_its_line(tmp_path):
    path = written(tmp_path, "a.yaml", "# comment\ngroup:\n  key: 1\n\n  list:\n    - name: x\n      weight: 2\n")
    layer = read_yaml(path)
    assert layer.where(("group", "key")) == f"{path}:3"
    assert layer.where(("group", "list", 0, "weight")) == f"{path}:7"
    assert layer.where(("group", "absent")) == f"{path}:2"
    assert layer.where(("absent",)) == str(path)


def test_keys_are_text_as_written(tmp_path):
    layer = read_yaml(written(tmp_path, "a.yaml", "on: 1\n12: 2\n2024-01-01: 3\nnull: 4\n"))
    assert layer.values == {"on": 1, "12": 2, "2024-01-01": 3, "null": 4}


def test_anchors_are_followed(tmp_path):
    layer = read_yaml(written(tmp_path, "a.yaml", "a: &dp 2\nb: *dp\nc: &list [*dp, 1]\nd: *list\n"))
    assert layer.values == {"a": 2, "b": 2, "c": [2, 1], "d": [2, 1]}


# Aliases of aliases: a few hundred characters that stand for 2**31 values.
DOUBLED = "[&a0 [1, 1], " + ", ".join(f"&a{n + 1} [*a{n}, *a{n}]" for n in range(30)) + "]"


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", ":3", "not valid YAML"),
        ("a: 1\n\tb: 2\n", ":2", "not valid YAML"),
        ("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n", ":5", "key c is given twice"),
        ("a: !!python/object:os.system x\n", ":1", "not valid YAML"),
        ("- 1\n- 2\n", "", "must hold `key: value` lines"),
        ("", "", "empty"),
        ("just words\n", "", "must hold `key: value` lines"),
        ("a: \x07\n", "", "not valid YAML"),
        (f"a: {'9' * 5000}\n", "", "not valid YAML"),
        ("a:\n  " + "- " * 20000 + "1\n", "", "not valid YAML"),
        ("? [1, 2]\n: 3\n", ":1", "not valid YAML"),
        ("a: &a\n  b:\n    c: *a\n", ":3", "a.b.c contains itself"),
        ("&a {b: *a}", ":1", "b contains itself"),
        ("- &a [*a]", ":1", "0.0 contains itself"),
        (f"a: {DOUBLED}", "", "more than 1,000,000"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused_by_file_and_line(tmp_path, text, line, what):
    path = written(tmp_path, "bad.yaml", text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert str(caught.value).startswith(f"{path}{line}: ")
    assert what in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_binary_content_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: there is no such file"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(UserError, match=r"binary\.yaml, line 1: not UTF-8 text"):
        read_yaml(tmp_path / "binary.yaml")


def test_a_chain_of_bases_is_relative_to_each_file(tmp_path):
    (tmp_path / "deep").mkdir()
    written(tmp_path / "deep", "root.yaml", "x: 1\n")
    written(tmp_path / "deep", "middle.yaml", "base_config: root.yaml\nx: 2\n")
    top = written(tmp_path, "top.yaml", "base_config: deep/middle.yaml\nx: 3\n")
    chain = read_chain(top)
    assert [layer.values for layer in chain] == [{"x": 1}, {"x": 2}, {"x": 3}]
    assert chain[-1].where(()) == str(top)


def test_a_circle_of_bases_is_refused(tmp_path):
    a = written(tmp_path, "a.yaml", "x: 1\nbase_config: b.yaml\n")
    b = written(tmp_path, "b.yaml", "base_config: ./a.yaml\n")
    with pytest.raises(UserError, match="leads back to a file of the same chain") as caught:
        read_chain(a)
    assert str(caught.value).startswith(f"{b}:1: base_config ./a.yaml")
    own = written(tmp_path, "own.yaml", "base_config: own.yaml\n")
    with pytest.raises(UserError, match="leads back"):
        read_chain(own)


def test_a_base_that_is_no_file_is_named_where_it_is_asked_for(tmp_path):
    path = written(tmp_path, "a.yaml", "x: 1\nbase_config: missing.yaml\n")
    with pytest.raises(UserError) as caught:
        read_chain(path)
    assert str(caught.value).startswith(f"{path}:2: base_config names {tmp_path / 'missing.yaml'}")
    path = written(tmp_path, "b.yaml", "base_config: [a.yaml]\n")
    with pytest.raises(UserError, match="must be the path of one YAML file"):
        read_chain(path)


@pytest.mark.parametrize("text", ["&a [*a]", "[&a [1], *a, &b {x: *b}]", DOUBLED])
def test_a_value_without_end_is_no_value(text):
    with pytest.raises(NOT_YAML, match=r"contains itself|more than 1,000,000"):
        parse(text)
