"""Calls that a model writes: read back as they were written, and answered with a reason where they are broken."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.data.tool_formats import CODE, CODE_TOOL, FORMATS, ToolCall, ToolFormat, load_tool_format, read_call
from mindrlhf.errors import UserError

NAMES = st.text(min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(NAMES, JSON, max_size=3))
CODES = st.text(max_size=60).filter(lambda code: "`" not in code and "<" not in code and "\r" not in code)


@given(st.lists(CALLS, max_size=4), st.text(max_size=20))
def test_hermes_reads_what_it_writes(calls, said):
    hermes = load_tool_format("hermes")
    text = "\n".join([f"<think>{hermes.render(ToolCall('no', {}))}</think>", *map(hermes.render, calls), said])
    if "tool_call>" not in said and "</think>" not in text.partition("</think>")[2]:
        assert hermes.parse(text) == calls


@pytest.mark.parametrize("name", ["retool", "python_block"])
@given(codes=st.lists(CODES, max_size=3))
def test_code_is_read_as_it_is_written(name, codes):
    own = load_tool_format(name)
    calls = [ToolCall(CODE_TOOL, {CODE: code}) for code in codes]
    text = "Let me see.\n" + "\nand\n".join(map(own.render, calls))
    assert [call.arguments[CODE] for call in own.parse(text)] == [code.strip("\n") for code in codes]
    assert not any(call.error for call in own.parse(text))


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "no </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}} or</tool_call>', "Extra data"),
        ("hermes", '<tool_call>{"name": "f" "arguments": {}}</tool_call>', "delimiter"),
        ("hermes", "<tool_call></tool_call>", "Expecting value"),
        ("hermes", '<tool_call>["f"]</tool_call>', '"name"'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '"name"'),
        ("hermes", '<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', "has 'parameters'"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', '"arguments" of f'),
        ("hermes", f"<tool_call>{'[' * 9999}{']' * 9999}</tool_call>", "levels deep"),
        ("retool", "so <code>print(1)", "no </code>"),
        ("python_block", "so\n```python\nprint(1)", "closing ```"),
    ],
)
def test_a_broken_call_is_answered_with_the_reason(name, text, reason):
    (call,) = load_tool_format(name).parse(text)
    assert call.error.startswith("Error: ")
    assert reason in call.error
    assert (call.name, call.arguments) == ("", {})


@pytest.mark.parametrize("text", ["</tool_call>", "<tool_call>", "<tool_call>{}</tool_call>\n"])
def test_a_call_may_hold_tags(text):
    hermes = load_tool_format("hermes")
    calls = [ToolCall("f", {"x": text, text: []}), ToolCall(text, {})]
    assert hermes.parse("".join(map(hermes.render, calls))) == calls


def test_a_broken_call_leaves_the_others():
    text = '<tool_call>{"name":\n</tool_call><tool_call>\n{"name": "f", "arguments": "{\\"x\\": 1}"}\n</tool_call>'
    broken, call = load_tool_format("hermes").parse(text)
    assert broken.error
    assert call == ToolCall("f", {"x": 1})


def test_reasoning_that_is_not_closed_calls_nothing():
    for name in ("hermes", "python_block"):
        form = load_tool_format(name)
        call = form.render(ToolCall(CODE_TOOL, {CODE: "print(1)"}))
        assert form.parse(f"<think>\nI could call\n{call}\nor") == []
        assert len(form.parse(f"<think>\nI call\n</think>\n{call}")) == 1


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "It is 4.", "`python`", "</think>", "</code></tool_call>"])
def test_a_turn_without_calls(name, text):
    assert load_tool_format(name).parse(text) == []


CALL = '<tool_call>{"name": "f"}</tool_call>'


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (f"<think>I could {CALL}", 0),
        (f"I could {CALL} but</think>so: 4", 0),  # the prompt has the opening tag
        (f"<think>hm</think>{CALL}<think>or {CALL}", 1),
        (f"<think>hm</think>{CALL}<think>or {CALL}</think>{CALL}", 2),
        (f"{CALL}<think>hm</think>", 1),
        ('<tool_call>{"name": "f", "arguments": {"t": "<think>"}}</tool_call>' + CALL, 2),
        ('<think>hm</think><tool_call>{"name": "f", "arguments": {"t": "</think>"}}</tool_call>', 1),
        ("<think>" * 3000 + CALL, 0),
    ],
)
def test_a_thought_calls_nothing(text, count):
    """Closed or not, and only where the tags are not within a call."""
    assert [call.name for call in load_tool_format("hermes").parse(text)] == ["f"] * count


def test_code_in_an_unfinished_thought_is_not_run():
    own = load_tool_format("python_block")
    block = "\n```python\nprint(1)\n```\n"
    assert own.parse(f"<think>I could{block}") == []
    assert [call.arguments for call in own.parse(f"<think>hm</think>{block}")] == [{CODE: "print(1)"}]
    assert len(own.parse("\n```python\nprint('<think>')\n```\n")) == 1


def test_retool_takes_code_without_a_fence_and_within_reasoning():
    (call,) = load_tool_format("retool").parse("<think>so <code>\nprint(1)\n</code>")
    assert call.arguments == {CODE: "print(1)"}


def test_retool_marks_the_interpreter_s_words():
    own = load_tool_format("retool")
    said, more = "Well\n<code>\nprint(1)\n</code>", "So it is 1."
    pieces = own.pieces(said + own.answer("1") + more)
    assert pieces == [(said, True), (own.answer("1"), False), (more, True)]


def test_calls_of_a_row():
    """OpenAI's form, a bare one, arguments as text; and a call that is no code."""
    expected = ToolCall("f", {"x": 1})
    function = {"name": "f", "arguments": {"x": 1}}
    text = {"name": "f", "arguments": json.dumps({"x": 1})}
    assert [read_call(each) for each in ({"type": "function", "function": function}, function, text)] == [expected] * 3
    with pytest.raises(ValueError, match="without 'code'"):
        load_tool_format("retool").render(expected)


def test_a_format_of_one_s_own(tmp_path):
    file = tmp_path / "formats.py"
    file.write_text(
        "from mindrlhf.data.tool_formats import ToolCall, ToolFormat\n\n\n"
        "class Shout(ToolFormat):\n    stop_strings = ('!',)\n\n"
        "    def parse(self, text):\n        return [ToolCall(text.rstrip('!'), {})]\n\n\nother = 3\n\n\n"
        "def function():\n    pass\n"
    )
    own = load_tool_format(f"{file}:Shout")
    assert isinstance(own, ToolFormat)
    assert own.parse("f!") == [ToolCall("f", {})]
    assert own.answer("4") is None
    for name, reason in (("function", "derived from"), ("other", "not a function"), ("None", "has no 'None'")):
        with pytest.raises(UserError, match=reason):
            load_tool_format(f"{file}:{name}")
    with pytest.raises(UserError, match="nearest: 'hermes'"):
        load_tool_format("hermess")


@pytest.mark.parametrize("name", ["retool", "python_block"])
@pytest.mark.parametrize("code", ["print('</code>')", "x = '''\n```\n'''", "'</think>'", "```python\n1\n```", "ok = 1"])
def test_code_with_the_signs_of_its_format(name, code):
    """It comes back as it was, or is refused."""
    written, call = load_tool_format(name), ToolCall(CODE_TOOL, {CODE: code})
    if code == "ok = 1":
        assert written.parse(written.render(call)) == [call]
    with suppress(ValueError):
        assert written.parse(written.render(call)) == [call]


@pytest.mark.parametrize("text", ["</think>", "<tool_call>", "</tool_call>", "a</think>\n<think>b", '"</tool_call>"'])
def test_arguments_with_the_signs_of_hermes(text):
    call = ToolCall("say", {"text": text, text: [text]})
    hermes = load_tool_format("hermes")
    assert hermes.parse(hermes.render(call)) == [call]
