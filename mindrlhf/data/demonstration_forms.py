"""Forms of other suites' demonstrations, as messages: ShareGPT's conversations and Alpaca's instructions."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mindrlhf.data.tasks.conversation import with_joined_parts

# Who speaks in ShareGPT's form -> the role of a message
SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
OWN = ("messages", "completion", "text")
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>\s*", re.DOTALL)
_RESPONSES = re.compile(rf"\s*(?:{_RESPONSE.pattern})+", re.DOTALL)


def as_messages(row: Mapping[str, Any]) -> dict[str, Any]:
    """Write a row of another form with `messages`, and join parts of contents.

    ShareGPT's `conversations` have `from` and `value`, or a message's own keys, and may have a `weight`; tools' answers
    in Hermes' tags become a message each, because chat templates write the tags. Alpaca's `instruction` has an `input`
    on lines of its own, and an `output`. Both may have a `system` prompt. ValueError names what cannot be read.
    """
    given = [key for key in OWN if row.get(key) is not None]
    if not given and row.get("conversations") is not None:
        turns = enumerate(_listed(row["conversations"]))
        messages = [message for number, turn in turns for message in _messages(turn, number)]
        return {**row, "messages": _with_system(row, messages)}
    if not given and isinstance(row.get("instruction"), str) and row.get("output") is not None:
        if row.get("history"):
            raise ValueError("history is not read beside instruction and output; write the turns as messages")
        asked = "\n".join(filter(None, (row["instruction"], row.get("input"))))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
        return {**row, "messages": _with_system(row, turns)}
    return {
        **row,
        **{key: with_joined_parts(row[key], key) for key in ("messages", "prompt", "completion") if key in row},
    }


def _listed(conversations: Any) -> list[Any]:
    if not isinstance(conversations, list):
        raise ValueError(f"conversations should be a list, and is {conversations!r:.80}")
    return conversations


def _messages(turn: Any, number: int) -> Iterator[Any]:
    """Write a turn as a message, or several answers of tools as one each."""
    if not isinstance(turn, Mapping) or "from" not in turn:
        yield turn
        return
    if turn["from"] not in SPEAKERS:
        found = f"conversations: message {number} is from {turn['from']!r}, which is none of {', '.join(SPEAKERS)}"
        raise ValueError(f"{found}; write it as messages, a call with tool_calls")
    role = SPEAKERS[turn["from"]]
    value = turn.get("value")
    tagged = role == "tool" and isinstance(value, str) and _RESPONSES.fullmatch(value)
    for content in _RESPONSE.findall(value) if tagged else [value]:
        yield {"role": role, "content": content, "weight": turn.get("weight")}


def _with_system(row: Mapping[str, Any], messages: list[Any]) -> list[Any]:
    system = row.get("system")
    if not isinstance(system, str) or not system:
        return messages
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": system}, *messages]
    if first.get("content") != system:
        raise ValueError("the row has a system prompt, and its conversation begins with another one; leave one out")
    return messages
