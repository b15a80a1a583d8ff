"""Messages of rows in the form that chat templates take."""

from collections.abc import Callable, Mapping
from typing import Any

from mindrlhf.data.tasks.conversation import check_messages
from mindrlhf.data.tokenizer_config import ConfiguredTokenizer
from mindrlhf.data.tool_formats import read_call

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the usual one first
Edit = Callable[[str], str]


class MessageReader:
    """Reader of conversations for chat templates.

    Null entries and empty lists of calls are left out, arguments of calls become objects, and reasoning has the names
    that templates read. Control tokens of the tokenizer stay text (`plain_text`; tags such as `<think>` stay tokens),
    and an end token behind an assistant's turn is left out, because the template writes one. kept: number of
    conversations and texts that spell control tokens.
    """

    def __init__(self, tokenizer: ConfiguredTokenizer | None = None):
        """Read for a tokenizer; None leaves texts as they are."""
        self._tokenizer = tokenizer
        self.kept = 0

    def __call__(self, messages: Any) -> list[dict[str, Any]]:
        """Read a conversation. Raises ValueError for malformed messages."""
        check_messages(messages)
        read = list(map(self._message, messages))
        if self._tokenizer is None:
            return read
        plain = [_edited(message, self._plain) for message in read]
        self.kept += plain != read
        return plain

    def text(self, text: str) -> str:
        """Read a text that becomes a part of a prompt."""
        plain = text if self._tokenizer is None else self._plain(text)
        self.kept += plain != text
        return plain

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        calls = [_with_arguments(call) for call in message.get("tool_calls") or ()]
        read = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
        read |= {"tool_calls": calls} if calls else {}
        reasoning = next((read[key] for key in REASONING if key in read), None)
        if reasoning is not None:
            read = {"thinking": reasoning, **read, "reasoning_content": reasoning}
        if self._tokenizer is not None and message["role"] == "assistant" and "content" in read:
            read["content"] = self._tokenizer.without_end(read["content"])
        return read

    def _plain(self, text: str) -> str:
        return self._tokenizer.plain_text(text, markup=True)


def _with_arguments(call: Any) -> dict[str, Any]:
    """Write a call's arguments as an object, in the call's own form."""
    arguments = dict(read_call(call).arguments)
    if "function" in call:
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def _edited(value: Any, edit: Edit) -> Any:
    """Edit all texts of a nested value."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, Mapping):
        return {key: _edited(item, edit) for key, item in value.items()}
    return [_edited(item, edit) for item in value] if isinstance(value, list) else value
