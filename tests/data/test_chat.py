"""Conversations as text: ChatML, a template in HF's dialect, and what is refused."""

import json

import pytest
from slow_cases import few_of

from mindrlhf.data import chat
from mindrlhf.data.chat import render_conversations
from mindrlhf.data.templates import default_system_prompt
from mindrlhf.errors import UserError
from mindrlhf.models.families.qwen2 import CHATML

MESSAGES = [{"role": "user", "content": "Hello\n"}, {"role": "assistant", "content": "Hi"}]


def render_messages(messages, chat_template, **tokens):
    return render_conversations([(messages, "row 1")], chat_template, **tokens)[0]


def test_without_a_template_it_is_chatml():
    expected = "<|im_start|>user\nHello\n<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render_messages(MESSAGES, None) == expected


def test_a_template_of_its_own():
    """Blocks leave no line behind, loops can be left, and tokens are at hand, as HF's classes have it."""
    template = (
        "{% for message in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}"
    )
    assert render_messages(MESSAGES, template, eos_token="<end>") == "Hello<end>\n>"


def test_qwen_s_own_template_gives_what_chatml_gives(shared):
    """The published one of Qwen2.5, with its default system prompt where there is no system message."""
    config = shared / "data" / "qwen2_5_tokenizer" / "tokenizer_config.json"
    if not config.is_file():
        pytest.skip("its tokenizer_config.json is not here")
    template = json.loads(config.read_text())["chat_template"]
    messages = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert render_messages(messages, template) == render_messages(messages, None)


@pytest.mark.parametrize("messages", [None, "Hello", [], ["Hello"], [{"role": "user", "content": None}], {"role": "x"}])
def test_what_is_no_conversation(messages):
    with pytest.raises(UserError, match="row 1: message"):
        render_messages(messages, None)


@pytest.mark.parametrize("template", ["{{ raise_exception('only users') }}", "{{ messages", "{{ messages.x.y }}"])
def test_a_template_that_fails(template):
    with pytest.raises(UserError, match="row 1: the tokenizer's chat template fails"):
        render_messages(MESSAGES, template)


def test_json_is_written_as_hf_writes_it():
    """Without jinja2's escapes for HTML."""
    template = "{{ messages[0] | tojson }}{{ messages[0].content | tojson(ensure_ascii=true) }}"
    assert render_messages([{"role": "user", "content": "<é'>"}], template) == (
        '{"role": "user", "content": "<é\'>"}"<\\u00e9\'>"'
    )


def test_a_process_renders_one_request_after_another(monkeypatch):
    """Each with its own limit of time; after a failure too, and not after its end."""
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    work = "{% for i in range(60000) %}{% set x = 'a' * i %}{% endfor %}"
    render = chat.Renderer(work + "{{ word }}{{ messages[0].content }}", {"word": "+"})
    for number in range(25):
        assert render([{"messages": [{"content": str(number)}]}, {"messages": [{"content": "\u2028"}]}]) == [
            f"+{number}",
            "+\u2028",
        ]
    with pytest.raises(chat.RenderingError, match="fails") as failed:
        render([{"messages": [{"content": ""}]}, {"messages": 3}])
    assert failed.value.conversation == 1
    assert render([]) == []
    render.close()
    with pytest.raises(ValueError, match="closed"):
        render([])


HOSTILE = {
    "division": "{{ 1 / 0 }}",
    "include": "{% include '/etc/passwd' %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "nesting": "{% if true %}" * 3000 + "{% endif %}" * 3000,
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "constant": "{{ 9 ** (9 ** 9) }}",
    "memory": "{{ ('a' * 10 ** 10) | length }}",
    "flood": "{{ 'a' * 10 ** 8 }}",
    "attribute": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}


BURNING = ("endless", "constant", "flood")  # seconds each


@pytest.mark.parametrize("name", few_of([name for name in HOSTILE if name not in BURNING], BURNING))
def test_a_hostile_template_has_the_usual_system_prompt(name, monkeypatch):
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    assert default_system_prompt(HOSTILE[name]) == CHATML.system


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_a_sentence(name, monkeypatch):
    """Whatever a downloaded template does, the process that reads it goes on."""
    monkeypatch.setattr(chat, "CPU_SECONDS", 1)
    with pytest.raises(UserError, match="row 1: the tokenizer's chat template"):
        render_messages(MESSAGES, HOSTILE[name])


def test_the_row_that_a_template_refuses_is_named():
    template = "{% if messages|length > 1 %}{{ raise_exception('one only') }}{% endif %}{{ messages[0].content }}"
    rows = [(MESSAGES[:1], "row 1"), (MESSAGES, "row 2")]
    with pytest.raises(UserError, match=r"row 2: the tokenizer's chat template fails \(TemplateError: one only\)"):
        render_conversations(rows, template)
    assert render_conversations(rows[:1] * 3, template) == ["Hello\n"] * 3
