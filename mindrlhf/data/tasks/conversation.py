"""Conversations as problems: `[{"role": ..., "content": ...}, ...]` that end with the user."""

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def check_messages(messages: Any, name: str = "messages") -> None:
    """Raise ValueError, which begins with `name`, for anything but messages.

    A message with `tool_calls` needs no content.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name} should be a list of messages with at least one, and is {messages!r:.80}")
    for number, message in enumerate(messages):
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and _has_content(message)):
            found = f"{name}: message {number} should be an object with the texts role and content"
            raise ValueError(f"{found}, and is {message!r:.80}")


def _has_content(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    calls = message.get("tool_calls") or []
    return isinstance(calls, list) and (isinstance(content, str) or (content is None and bool(calls)))


def checked(messages: Any, key: str) -> Messages:
    """Check a conversation and drop its null entries; ValueError names `key`."""
    check_messages(messages, f"key {key!r}")
    empty = next((number for number, message in enumerate(messages) if _is_empty(message)), None)
    if empty is not None:
        raise ValueError(f"key {key!r}: message {empty} has no text")
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"key {key!r} should end with a user message, and ends with {messages[-1]['role']!r}")
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Test for an empty message without calls.

    A tool's may be empty, and a system's, which takes the place of a default one.
    """
    silent = message["role"] in ("tool", "system")
    return not ((message.get("content") or "").strip() or message.get("tool_calls") or silent)


def system_prompt(messages: Messages) -> str | None:
    """Return the text of the first system message, or None."""
    return messages[0].get("content") if messages[0]["role"] == "system" else None


def with_system_prompt(messages: Messages, text: str) -> Messages:
    """Replace the system message of a conversation; "" is none."""
    turns = messages if system_prompt(messages) is None else messages[1:]
    return [{"role": "system", "content": text}, *turns] if text else turns


def with_joined_parts(messages: Any, name: str) -> Any:
    """Write contents that are lists of text parts as one text. ValueError."""
    if not isinstance(messages, list):
        return messages
    return [_joined(message, f"{name}: message {number}") for number, message in enumerate(messages)]


def _joined(message: Any, where: str) -> Any:
    parts = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(f"{where} has a part of the type {kind!r}, and text is read alone")
    return {**message, "content": "".join(part["text"] for part in parts)}
