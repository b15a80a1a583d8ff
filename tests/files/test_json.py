"""JSON from elsewhere: what is read, and the one kind of error for all else."""

import json

import pytest

from mindrlhf.files.json import MOST_LEVELS, is_number, is_whole, parse_json


def test_what_can_be_read():
    assert parse_json('{"a": [1, 2.5, "x", null]}') == {"a": [1, 2.5, "x", None]}
    assert parse_json(b'"\xc3\xa9"') == "é"
    assert parse_json("[" * MOST_LEVELS + "]" * MOST_LEVELS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "more than 200 levels"),
        ('{"a":' * 100_000, "more than 200 levels"),
        ("[" * 201 + "1" + "]" * 201, "more than 200 levels"),
        ("7" * 5000, "thousands of digits"),
        (b'"\xff"', "utf-8"),
        ("{", "Expecting"),
    ],
)
def test_all_else_is_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_broken_syntax_keeps_its_place():
    with pytest.raises(json.JSONDecodeError) as caught:
        parse_json('{"a": 1,\n"b"}')
    assert caught.value.lineno == 2


@pytest.mark.parametrize("value", [0, -3, 2.5, float("nan"), float("inf"), 10**300])
def test_numbers(value):
    assert is_number(value)
    assert is_whole(value) == isinstance(value, int)


@pytest.mark.parametrize("value", [True, None, "1", [1], {}, 10**400])
def test_no_numbers(value):
    assert not is_number(value)
    assert not is_whole(value)
