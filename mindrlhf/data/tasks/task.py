"""Tasks: the way from a source row to a question with a checkable answer."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mindrlhf.data.tasks.conversation import Messages
from mindrlhf.errors import UserError
from mindrlhf.rewards.batches import MESSAGES
from mindrlhf.rewards.columns import encode

MISSES = 300  # after this many draws in a row without a new problem, no more are expected


@dataclass(frozen=True)
class TaskRow:
    """Problem of a task.

    question: text of the user turn, or a conversation's last message. answer: worked answer, for a warm start, or "".
    ground_truth: for the reward function, with its type; None or "" without one. extra: other columns with their types.
    messages: the row's conversation. prompt: the row's whole prompt, used without a template.
    """

    question: str
    answer: str
    ground_truth: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    messages: Messages | None = None
    prompt: str | None = None


@dataclass(frozen=True)
class Task:
    """Kind of problem.

    instruction: default sentence after the question that asks for an answer format, or "". reward: name of its reward
    function. parse: source row (a JSON object) -> TaskRow; ValueError names the fault of a malformed row.
    """

    name: str
    instruction: str
    reward: str
    parse: Callable[[Mapping[str, Any]], TaskRow]


def prompt_fields(task: str, row: TaskRow) -> dict[str, str]:
    """Write a problem's columns as fields; a missing ground truth is left out."""
    columns = {"task": task, "question": row.question, **row.extra}
    found = [truth for truth in (row.ground_truth, columns.pop("ground_truth", None)) if not is_missing(truth)]
    messages = {} if row.messages is None else {MESSAGES: row.messages}
    return encode(columns | ({"ground_truth": found[0]} if found else {}) | messages)


def is_missing(value: Any) -> bool:
    """Test for a column without a value: None, or a text without a character."""
    return value is None or (isinstance(value, str) and not value.strip())


def text_field(row: Mapping[str, Any], key: str) -> str:
    """Return the non-empty text under `key`; ValueError without one."""
    if key not in row:
        raise ValueError(f"key {key!r} is missing (found: {', '.join(map(repr, row)) or 'none'})")
    value = row[key]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"key {key!r} should be text, and is {value!r}")
    return value


def optional_text(row: Mapping[str, Any], key: str) -> str:
    """Return the text under `key`, or "" without one; raises as `text_field`."""
    return "" if is_missing(row.get(key)) else text_field(row, key)


def distinct(count: int, draw: Callable[[], tuple[Hashable, dict[str, Any]] | None], kind: str) -> list[dict[str, Any]]:
    """Draw `count` source rows with different keys, in the order of drawing.

    draw: returns (key, source row), or None for a draw without result. UserError when no new keys come.
    """
    rows: dict[Hashable, dict[str, Any]] = {}
    misses = 0
    while len(rows) < count:
        key, row = draw() or (None, {})
        if key is not None and key not in rows:
            rows[key] = row
            misses = 0
        elif (misses := misses + 1) == MISSES:
            raise UserError(
                f"{count} different {kind} problems are asked for, and there are about {len(rows)} with these numbers: "
                "raise --max_number or lower the sizes."
            )
    return list(rows.values())
