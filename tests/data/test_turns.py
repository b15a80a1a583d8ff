"""Ids between the turns of a conversation: exactly what the chat template writes there."""

import json

import numpy as np
import pytest
from sample_conversations import CALL, CODE, MESSAGES, THINKING, TOOLS, drawn_text

from mindrlhf.data import turns
from mindrlhf.data.chat import render_conversations
from mindrlhf.data.tool_formats import PythonBlock, ReTool
from mindrlhf.data.turns import TurnTemplate
from mindrlhf.errors import UserError


@pytest.fixture(scope="module")
def template(qwen):
    return qwen.chat_template or pytest.skip("Qwen2.5's tokenizer_config.json is not here")


def test_qwen_s_conversation_is_the_template_s(qwen, template):
    """With its own way of writing calls, tools and their answers."""
    found = TurnTemplate(qwen, template).conversation(MESSAGES, TOOLS)
    whole = [*MESSAGES, {"role": "user", "content": "Bye."}]
    whole = [{**message, "content": message["content"] or ""} for message in whole]
    (text,) = render_conversations([(whole, "row 1")], template, tools=TOOLS)
    written = qwen.decode([*found.prompt_ids, *found.response_ids])
    assert written + "\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n" == text
    assert json.dumps(TOOLS[0]["function"]["description"])[1:-1] in written
    ends = drawn_text(qwen, found).split("<|im_end|>")
    assert ends[-3:] == ["It is 2.", "Yes.", ""]
    assert ends[0].startswith("<think>\nhm\n</think>\n\nLet me see.\n<tool_call>\n")
    assert ends[0].count(CODE.replace('"', '\\"')) == 2
    assert "tool_response" not in drawn_text(qwen, found)


def test_answers_begin_and_end_at_the_border(qwen, template):
    own = TurnTemplate(qwen, template)
    messages = [{"role": "tool", "content": "4"}]
    expected = "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert qwen.id_to_token(own.end_id) == "<|im_end|>"
    for turn in (None, [5, own.end_id]):
        np.testing.assert_array_equal(own.answers(messages, turn), qwen.encode(expected))
    for turn in ([], [5], [5, qwen.eos_token_id] if qwen.eos_token_id != own.end_id else [6]):
        np.testing.assert_array_equal(own.answers(messages, turn), qwen.encode(f"<|im_end|>{expected}"))
    assert own.answers(messages).dtype == np.int32
    np.testing.assert_array_equal(own.answers([]), qwen.encode("\n<|im_start|>assistant\n"))


def test_retool_answers_within_the_turn(small):
    own = TurnTemplate(small, tool_format=ReTool())
    tool = [{"role": "tool", "content": "4"}]
    assert small.decode(own.answers(tool, [5])) == "\n<interpreter>\n4\n</interpreter>\n"
    ended = small.decode(own.answers(tool, [5, own.end_id]))
    assert ended.startswith("\n<|im_start|>user\n\n<interpreter>\n4\n</interpreter>\n<|im_end|>")
    user = small.decode(own.answers([{"role": "user", "content": "And?"}], [5]))
    assert user == "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


def test_retool_s_rows(small):
    """Calls and tool messages as they are published, or the tags in one text: the same ids."""
    own = TurnTemplate(small, tool_format=ReTool())
    said, answer, more = f"<code>\n```python\n{CODE}\n```\n</code>", "\n<interpreter>\n2\n</interpreter>\n", "It is 2."
    asked = {"role": "user", "content": "1+1?"}
    calls = [{"role": "assistant", "content": "Well.", "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    found = own.conversation([asked, *calls, {"role": "assistant", "content": more}])
    tags = own.conversation([asked, {"role": "assistant", "content": f"Well.\n{said}{answer}{more}"}])
    for one, other in zip(vars(found).values(), vars(tags).values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert small.decode(found.response_ids) == f"Well.\n{said}{answer}{more}<|im_end|>"
    assert drawn_text(small, found) == f"Well.\n{said}{more}<|im_end|>"


def test_python_blocks_are_answered_by_one_user_turn(small):
    own = TurnTemplate(small, tool_format=PythonBlock())
    tools = [{"role": "tool", "content": "4"}, {"role": "tool", "content": "5"}]
    text = small.decode(own.answers(tools, [own.end_id]))
    assert text.startswith("\n<|im_start|>user\n```output\n4\n```\n```output\n5\n```<|im_end|>\n")


def test_the_markup_of_a_family(small):
    """Without a chat template: the ChatML that `mindrlhf data` writes prompts in."""
    own = TurnTemplate(small)
    (text,) = render_conversations([(MESSAGES[:2], "row 1")], None)
    np.testing.assert_array_equal(own.prompt(MESSAGES[:2]), small.encode(text))
    assert small.decode(own.answers([{"role": "user", "content": ""}])) == (
        "\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_strips_reasoning_comes_without_it(small):
    own = TurnTemplate(small, THINKING)
    found = own.conversation(
        [
            *MESSAGES[1:2],
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nOne."},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes."},
        ]
    )
    expected = "<think>\nhm\n</think>\n\nOne.<|im_end|><think>\n\n</think>\n\nYes.<|im_end|>"
    assert drawn_text(small, found) == expected


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (THINKING.replace("loop.last or", "loop.last  or"), "drops earlier reasoning .* role user"),
        ("{{ messages | length }}{{ messages | length }}<|im_end|>", "writes earlier turns anew"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "without an end token"),
        ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", "without an end token"),
        ("{{ raise_exception('no') }}", r"fails \(TemplateError: no\)"),
        ("{% for m in messages %}{{ m.content }}", "fails"),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{{ m.content }}<|im_end|>{% endfor %}",
            "no tools",
        ),
    ],
)
def test_a_template_that_is_refused(small, template, reason):
    with pytest.raises(UserError, match=f"^the (tokenizer's )?chat template.*{reason}"):
        TurnTemplate(small, template)


def test_a_tokenizer_without_any_markup(small, monkeypatch):
    monkeypatch.setattr(turns, "family_chat", lambda tokenizer: None)
    with pytest.raises(UserError, match="no chat template"):
        TurnTemplate(small)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "should be a list"),
        ([], "should be a list"),
        (["hello"], "message 0"),
        ([{"role": "user", "content": None}], "message 0"),
        ([{"role": "user", "content": "x"}], "one of the assistant"),
        ([{"role": "assistant", "content": "x"}], "one of the assistant"),
        ([MESSAGES[1], {"role": "assistant", "tool_calls": [{"name": 3}]}], "object with a"),
        ([MESSAGES[1], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}], "Expecting"),
    ],
)
def test_messages_that_are_refused(small, messages, reason):
    with pytest.raises(UserError, match=reason):
        TurnTemplate(small).conversation(messages)
