"""A user's own rows, with keys of their choice for question and ground truth."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindrlhf.data.tasks.conversation import checked, conversation_key
from mindrlhf.data.tasks.task import Task, TaskRow, optional_text, text_field
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import JSON_FIELDS, MESSAGES

OWN = ("question", "ground_truth")


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse `question`, and optional `ground_truth` and worked `answer`.

    The question is text or a conversation, which may also have the key `prompt` or `messages`; a `prompt` of text is
    the whole prompt. Any other key, and a conversation too, becomes a field; JSON text if it is not text.
    """
    messages, prompt = None, None
    key = "question" if isinstance(row.get("question"), list) else conversation_key(row)
    if key is not None and (key == "question" or row.get("question") is None):
        messages = checked(row[key], key)
        row = {name: value for name, value in row.items() if name != key}
        row |= {MESSAGES: messages, "question": messages[-1]["content"]}
    elif row.get("question") is None and isinstance(row.get("prompt"), str):
        prompt = text_field(row, "prompt")
        row = {name: value for name, value in row.items() if name != "prompt"} | {"question": prompt}
    texts = field_texts(row)
    encoded = [key for key in texts if not isinstance(row[key], str)]
    extra = {key: value for key, value in texts.items() if key not in OWN}
    return TaskRow(
        question=text_field(texts, "question"),
        answer=optional_text(texts, "answer"),
        ground_truth=optional_text(texts, "ground_truth"),
        extra=extra | ({JSON_FIELDS: json.dumps(encoded)} if encoded else {}),
        messages=messages,
        prompt=prompt,
    )


def field_texts(row: Mapping[str, Any]) -> dict[str, str]:
    """Write a row's values as text, or as JSON; nulls are left out."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        for key, value in row.items()
        if value is not None
    }


def mapped(task: Task, pairs: Sequence[str]) -> Task:
    """Adapt `task` to rows with other keys.

    pairs: `key=theirs` each, `theirs` with dots for nested groups. UserError for a pair that cannot be read.
    """
    paths: dict[str, tuple[str, ...]] = {}
    for pair in pairs:
        key, equals, path = pair.partition("=")
        if not (key and equals and path):
            raise UserError(f"--fields {pair}: should be KEY=THEIRS, for example question=problem.")
        paths[key] = tuple(path.split("."))
    taken = {path[0] for path in paths.values() if len(path) == 1}

    def renamed(row: Mapping[str, Any]) -> TaskRow:
        named = {key: _at(row, path) for key, path in paths.items()}
        return task.parse({key: value for key, value in row.items() if key not in taken} | named)

    return replace(task, parse=renamed) if paths else task


def _at(row: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = row
    for depth, part in enumerate(path):
        if not isinstance(value, Mapping) or part not in value:
            found = f" (found: {', '.join(map(repr, value))})" if isinstance(value, Mapping) else ""
            raise ValueError(f"key {'.'.join(path[: depth + 1])!r} of --fields is missing{found}")
        value = value[part]
    return value


GAME = Task(name="game", instruction="", reward="environment", parse=parse)
FIELDS = Task(name="fields", instruction="", reward="math", parse=parse)
