"""The prompt that a row states itself, whatever other columns it has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindrlhf.data.tasks.conversation import Messages, checked, with_joined_parts
from mindrlhf.data.tasks.task import text_field

KEYS = ("prompt", "messages")


@dataclass(frozen=True)
class GivenPrompt:
    """Prompt of a row under `key`: messages, or the whole text."""

    key: str
    question: str
    messages: Messages | None = None
    prompt: str | None = None


def given_prompt(row: Mapping[str, Any], keys: Sequence[str] = KEYS) -> GivenPrompt | None:
    """Find a row's own prompt, or a question that is a conversation.

    keys: names of prompts; the first with a value is taken. Raises ValueError for a prompt that is neither text nor
    messages.
    """
    talks = isinstance(row.get("question"), list)
    key = next((key for key in keys if row.get(key) is not None), "question" if talks else None)
    if key is None:
        return None
    if key == "prompt" and isinstance(row[key], str):
        text = text_field(row, key)
        return GivenPrompt(key, question=text, prompt=text)
    if key == "messages" and isinstance(row[key], str):
        raise ValueError("key 'messages' should be a list, and is text; call the key prompt")
    messages = checked(with_joined_parts(row[key], f"key {key!r}"), key)
    return GivenPrompt(key, question=messages[-1]["content"], messages=messages)
