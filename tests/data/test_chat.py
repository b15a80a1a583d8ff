"""Conversations as text: ChatML, a template in HF's dialect, and what is refused."""

import json

import pytest

from mindrlhf.data.chat import render_messages
from mindrlhf.errors import UserError

MESSAGES = [{"role": "user", "content": "Hello\n"}, {"role": "assistant", "content": "Hi"}]


def test_without_a_template_it_is_chatml():
    expected = "<|im_start|>user\nHello\n<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_messages(MESSAGES, "row 1", None) == expected


def test_a_template_of_its_own():
    """Blocks leave no line behind, loops can be left, and tokens are at hand, as HF's classes have it."""
    template = (
        "{% for message in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
    )
    assert render_messages(MESSAGES, "row 1", template, eos_token="<end>") == "Hello<end>\n>"


def test_qwen_s_own_template_gives_what_chatml_gives(shared):
    """The published one of Qwen2.5, with its default system prompt where there is no system message."""
    config = shared / "data" / "qwen2_5_tokenizer" / "tokenizer_config.json"
    if not config.is_file():
        pytest.skip("its tokenizer_config.json is not here")
    template = json.loads(config.read_text())["chat_template"]
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert render_messages(messages, "row 1", template) == render_messages(messages, "row 1", None)


@pytest.mark.parametrize("messages", [None, "Hello", [], ["Hello"], [{"role": "user", "content": None}], {"role": "x"}])
def test_what_is_no_conversation(messages):
    with pytest.raises(UserError, match="row 1: message"):
        render_messages(messages, "row 1", None)


@pytest.mark.parametrize("template", ["{{ raise_exception('only users') }}", "{{ messages", "{{ messages.x.y }}"])
def test_a_template_that_fails(template):
    with pytest.raises(UserError, match="row 1: the tokenizer's chat template fails"):
        render_messages(MESSAGES, "row 1", template)
