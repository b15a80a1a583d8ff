"""Prompt templates: the chat form equals the published chat template; the user's own files."""

import jinja2
import pytest

from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import THINK_SYSTEM, default_system_prompt, load_template, prompt_ids
from mindrlhf.errors import UserError
from mindrlhf.models.families.qwen2 import CHATML

QUESTION = "What is {{ 1 }} < 2 & 'x'?\n中"


def published(chat_template, messages):
    """What HF renders: the chat template in a plain jinja2 environment with HF's settings."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(chat_template).render(messages=messages, add_generation_prompt=True)


def rendered(tokenizer, question, template=None, system=None, instruction=""):
    row = TaskRow(question, "", "")
    (ids,) = prompt_ids([row], ["row 1"], instruction, template, system, tokenizer)
    return tokenizer.decode(ids)


@pytest.mark.parametrize("template", [None, "qwen", "chat"])
def test_qwen_is_the_published_chat_form(qwen, template):
    user = {"role": "user", "content": f"{QUESTION}\nSay it."}
    if not qwen.chat_template:
        pytest.skip("Qwen2.5's tokenizer_config.json is not here")
    assert rendered(qwen, QUESTION, template, None, "Say it.") == published(qwen.chat_template, [user])
    system = {"role": "system", "content": "Be short."}
    assert rendered(qwen, QUESTION, template, "Be short.", "Say it.") == published(qwen.chat_template, [system, user])
    bare = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(qwen, "Q", template, "") == bare  # no system prompt at all, not the template's own


@pytest.mark.parametrize("template", [None, "qwen", "chat"])
def test_qwen_without_a_chat_template(small, template):
    text = rendered(small, "Q", template)
    assert (
        text == f"<|im_start|>system\n{CHATML.system}<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    )
    assert rendered(small, "Q", template, "") == "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"


def test_default_system_prompt():
    assert default_system_prompt("{% for m in messages %}<|im_start|>{{ m.role }}{% endfor %}") == ""
    assert default_system_prompt("<|im_start|>system\nHi\nyou<|im_end|>\n{{ messages[0].content }}") == "Hi\nyou"
    assert default_system_prompt("{% unknown %}") == CHATML.system  # a dialect that jinja2 does not know


def test_plain():
    assert load_template("plain").render(QUESTION) == f"{QUESTION}\n"
    assert load_template("plain").render("Q", "I", "S") == "S\n\nQ\nI\n"


def test_think_asks_for_both_parts(small):
    text = rendered(small, "Q", "think")
    assert text.startswith(f"<|im_start|>system\n{THINK_SYSTEM}<|im_end|>\n<|im_start|>user\nQ<|im_end|>")
    assert text.endswith("<|im_start|>assistant\n")
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert tag in THINK_SYSTEM


def test_file(tmp_path):
    path = tmp_path / "mine.jinja"
    path.write_text("Q: {{ question|upper }}\n{% if system %}({{ system }}){% endif %}A:\n\n", encoding="utf-8")
    assert load_template(str(path)).render("why") == "Q: WHY\nA:\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\n{% if %}", "mine.jinja, line 2: not a jinja2 template"),
        ("{{ question }} {{ answr }}", "mine.jinja: uses answr, but a template is given question, instruction, system"),
        ("{{ question.nothing }}", "mine.jinja: rendering fails .*nothing"),
        ("{{ question + 1 }}", "mine.jinja: rendering fails .*TypeError"),
        ("{{ question.__class__.__mro__ }}", "mine.jinja: rendering fails .*SecurityError"),
    ],
)
def test_bad_files(tmp_path, content, message):
    path = tmp_path / "mine.jinja"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load_template(str(path)).render("q")


def test_neither_a_name_nor_a_file(tmp_path):
    with pytest.raises(UserError, match=r"neither one of qwen, .*plain, think, chat nor a file"):
        load_template("qwn")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        load_template(str(tmp_path))
