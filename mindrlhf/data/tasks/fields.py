"""A user's own rows, with keys of their choice for question and ground truth."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.data.tasks.task import Task, TaskRow, is_missing, text_field
from mindrlhf.errors import UserError
from mindrlhf.rewards.columns import json_text

Paths = Mapping[str, Sequence[str]]
"""Key of a task -> the keys that lead to its value in a row."""


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse `question`, and optional `ground_truth` and worked `answer`, of any type."""
    answer = row.get("answer")
    written = "" if is_missing(answer) else answer if isinstance(answer, str) else json_text(answer)
    return TaskRow(text_field(row, "question"), written, row.get("ground_truth"))


def field_paths(pairs: Sequence[str]) -> Paths:
    """Read `key=theirs` pairs, `theirs` with dots for nested groups. UserError."""
    paths: dict[str, Sequence[str]] = {}
    for pair in pairs:
        key, equals, path = pair.partition("=")
        if not (key and equals and path):
            raise UserError(f"--fields {pair}: should be KEY=THEIRS, for example question=problem.")
        paths[key] = path.split(".")
    return paths


def renamed(row: Mapping[str, Any], paths: Paths) -> dict[str, Any]:
    """Name columns as a task does; ValueError for a missing one."""
    taken = {path[0] for path in paths.values() if len(path) == 1}
    named = {key: _at(row, path) for key, path in paths.items()}
    return {key: value for key, value in row.items() if key not in taken} | named


def _at(row: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = row
    for depth, part in enumerate(path):
        if not isinstance(value, Mapping) or part not in value:
            found = f" (found: {', '.join(map(repr, value))})" if isinstance(value, Mapping) else ""
            raise ValueError(f"key {'.'.join(path[: depth + 1])!r} of --fields is missing{found}")
        value = value[part]
    return value


GAME = Task(name="game", instruction="", reward="environment", parse=parse)
FIELDS = Task(name="fields", instruction="", reward="math", parse=parse)
