"""Tasks by name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mindrlhf.data.source import SourceRow
from mindrlhf.data.tasks.arithmetic import ARITHMETIC
from mindrlhf.data.tasks.calculator import CALCULATOR
from mindrlhf.data.tasks.countdown import COUNTDOWN
from mindrlhf.data.tasks.digits import DIGITS
from mindrlhf.data.tasks.fields import FIELDS, GAME, field_paths, renamed
from mindrlhf.data.tasks.given_prompt import KEYS, given_prompt
from mindrlhf.data.tasks.gsm8k import GSM8K, MARK
from mindrlhf.data.tasks.multiplication import MULTIPLICATION
from mindrlhf.data.tasks.task import Task, TaskRow
from mindrlhf.data.tasks.verl import VERL
from mindrlhf.errors import UserError

_OWN = (GSM8K, COUNTDOWN, ARITHMETIC, MULTIPLICATION, CALCULATOR, DIGITS, GAME, FIELDS, VERL)
TASKS = {task.name: task for task in _OWN}


def get_task(name: str) -> Task:
    """Return the task called `name`; a UserError names the known ones."""
    if name not in TASKS:
        raise UserError(f"--dataset_type {name}: unknown; give one of {', '.join(TASKS)}.")
    return TASKS[name]


def parse_rows(rows: Sequence[SourceRow], name: str | None, fields: Sequence[str] = ()) -> tuple[Task, list[TaskRow]]:
    """Parse the rows of files by their task.

    name: the task's; None decides by the first row (`_task_of`). fields: `key=theirs` pairs, columns of the rows in
    place of the task's. A row's own prompt takes the place of the one that its task would write, and all other columns
    become fields. UserError, with its place, for a malformed row.
    """
    paths = field_paths(fields)
    # A column that the user names as the question is the question, whatever else the row has.
    keys = () if "question" in paths and not set(KEYS) & set(paths) else KEYS
    task = None if name is None else get_task(name)
    parsed = []
    for row in rows:
        try:
            values = renamed(row.values, paths)
            task = task or _task_of(values, keys)
            parsed.append(_problem(task, values, keys))
        except ValueError as error:
            advice = "" if name else "; name its task or its columns to `mindrlhf data` with --dataset_type or --fields"
            raise UserError(f"{row.where}: not a {task.name if task else 'known'} row: {error}{advice}.") from None
    return task, parsed


def _task_of(row: Mapping[str, Any], keys: Sequence[str]) -> Task:
    """Recognise the task of a row by its columns."""
    prompt = any(row.get(key) is not None for key in keys)
    answer = row.get("answer")
    columns = set(row)
    if isinstance(row.get("task"), str) and row["task"] in TASKS:
        return TASKS[row["task"]]
    if {"question", "environment", "seed"} <= columns:
        return GAME
    if "prompt" in row and ("reward_model" in row or ("data_source" in row and isinstance(row["prompt"], list))):
        return VERL
    if "factors" in row and not prompt:
        return MULTIPLICATION
    if "target" in row and {"nums", "numbers"} & columns and not prompt:
        return COUNTDOWN
    marked = isinstance(answer, str) and MARK in answer
    return GSM8K if "ground_truth" not in row and (marked or ("answer" in row and not prompt)) else FIELDS


def _problem(task: Task, row: Mapping[str, Any], keys: Sequence[str]) -> TaskRow:
    given = given_prompt(row, keys)
    if given is None:
        parsed = task.parse(row)
        others = {key: value for key, value in row.items() if key not in ("question", "prompt")}
        return replace(parsed, extra=others | dict(parsed.extra))
    others = {key: value for key, value in row.items() if key not in (given.key, "prompt")}
    own = others.get("question")
    parsed = task.parse(others | ({} if isinstance(own, str) and own.strip() else {"question": given.question}))
    return replace(parsed, extra=others | dict(parsed.extra), messages=given.messages, prompt=given.prompt)
