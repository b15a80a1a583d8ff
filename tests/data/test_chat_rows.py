"""Rows whose problem is a conversation: taken as messages, in JSONL and parquet, and written by the chat template."""

import json

import pytest

from mindrlhf.data.convert_problems import convert
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.parquet import write_parquet
from mindrlhf.data.source import given_rows
from mindrlhf.data.tasks import parse_rows
from mindrlhf.errors import UserError
from mindrlhf.models.families.qwen2 import CHATML

ASKED = {"role": "user", "content": "What is 2 + 3?"}
SHOWN = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "#### 2"}, ASKED]
BRIEF = {"role": "system", "content": "Be brief."}


def turn(role, content):
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def texts(tmp_path, tokenizer, rows, name="rows.jsonl", **arguments):
    """The prompts of a conversion, decoded."""
    path = tmp_path / name
    if path.suffix == ".parquet":
        write_parquet(path, rows)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    convert(path, tmp_path / "out.mindrecord", tokenizer, progress=False, **arguments)
    prompts = read_prompts(tmp_path / "out.mindrecord")
    return [tokenizer.decode(prompt.token_ids) for prompt in prompts], prompts


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize("arguments", [{}, {"task": "fields"}, {"fields": ("question=prompt",), "task": "fields"}])
def test_messages_become_turns(tmp_path, small, name, arguments):
    """Without a task too: the rows say what they are."""
    rows = [{"prompt": [BRIEF, ASKED], "ground_truth": "5", "level": "1"}]
    (text,), prompts = texts(tmp_path, small, rows, name, **arguments)
    assert text == turn("system", "Be brief.") + turn("user", "What is 2 + 3?") + "<|im_start|>assistant\n"
    fields = prompts[0].fields
    assert (fields["question"], fields["ground_truth"], fields["level"]) == ("What is 2 + 3?", "5", "1")


def test_several_turns(tmp_path, small):
    rows = [{"messages": SHOWN, "ground_truth": 5}]
    (text,), _ = texts(tmp_path, small, rows)
    turns = "".join(turn(message["role"], message["content"]) for message in SHOWN)
    assert text == turn("system", CHATML.system) + turns + "<|im_start|>assistant\n"


def test_an_empty_system_message_takes_the_place_of_the_default(tmp_path, small):
    """As the templates of transformers write it; OpenOrca's rows have such ones."""
    (text,), _ = texts(tmp_path, small, [{"prompt": [{"role": "system", "content": ""}, ASKED], "ground_truth": "5"}])
    assert text == turn("system", "") + turn("user", "What is 2 + 3?") + "<|im_start|>assistant\n"


def test_verls_rows_may_have_several_turns(tmp_path, small):
    rows = [{"data_source": "mine", "prompt": [BRIEF, *SHOWN], "reward_model": {"ground_truth": "5"}}]
    (text,), prompts = texts(tmp_path, small, rows)
    assert text.count("<|im_start|>") == 5
    assert prompts[0].fields["data_source"] == "mine"


@pytest.mark.parametrize(("given", "system"), [(None, "Be brief."), ("", None), ("Think.", "Think.")])
def test_a_system_prompt_of_the_command_line_replaces_the_row_s(tmp_path, small, given, system):
    rows = [{"prompt": [BRIEF, ASKED], "ground_truth": "5"}]
    (text,), _ = texts(tmp_path, small, rows, system_prompt=given)
    assert text.startswith(turn("system", system) if system else turn("user", ASKED["content"]))


def test_the_tokenizer_s_own_template_writes_them(tmp_path, small, monkeypatch):
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    monkeypatch.setattr(small, "config", small.config | {"chat_template": template, "bos_token": "3"})
    rows = [{"prompt": [BRIEF, ASKED], "ground_truth": "5"}] * 2
    written, _ = texts(tmp_path, small, rows)
    assert written == ["3[system] Be brief.<|im_end|>[user] What is 2 + 3?<|im_end|>"] * 2


def test_a_template_of_one_question(tmp_path, small):
    """One question with its system prompt fits any template; a conversation does not."""
    rows = [{"prompt": [BRIEF, ASKED], "ground_truth": "5"}]
    (text,), _ = texts(tmp_path, small, rows, template="plain")
    assert text == "Be brief.\n\nWhat is 2 + 3?\n"
    rows.append({"prompt": SHOWN, "ground_truth": "5"})
    with pytest.raises(UserError, match=r"line 2: has 3 messages, and the template writes one question; leave"):
        texts(tmp_path, small, rows, template="plain")


@pytest.mark.parametrize("task", ["fields", "verl"])
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "should be a list of messages with at least one"),
        (["Hello"], "message 0 should be an object"),
        ([{"role": "user", "content": None}], "message 0 should be an object"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0 has a part of the type 'image', and text"),
        ([ASKED, {"role": "assistant", "content": "5"}], "should end with a user message, and ends with 'assistant'"),
        ([{"role": "user", "content": " "}], "message 0 has no text"),
    ],
)
def test_what_is_no_conversation(task, messages, message):
    row = {"prompt": messages, "ground_truth": "5", "reward_model": {"ground_truth": "5"}}
    with pytest.raises(UserError, match=f"rows, row 0: not a {task} row: key 'prompt':? {message}"):
        parse_rows(given_rows([row], "rows"), task)


def test_questions_are_written_by_a_foreign_chat_template(tmp_path, small, monkeypatch):
    """A tokenizer with markup of its own (DeepSeek's, say) writes questions with it, unless another one is named."""
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[answer]"
    monkeypatch.setattr(small, "config", small.config | {"chat_template": template})
    rows = [{"question": "2 + 3?", "ground_truth": "5"}]
    (text,), _ = texts(tmp_path, small, rows, task="fields")
    assert text == "[user] 2 + 3?[answer]"
    (text,), _ = texts(tmp_path, small, rows, task="fields", system_prompt="Add.", template="chat")
    assert text == "[system] Add.[user] 2 + 3?[answer]"
    (text,), _ = texts(tmp_path, small, rows, task="fields", template="qwen", system_prompt="")
    assert text == turn("user", "2 + 3?") + "<|im_start|>assistant\n"
