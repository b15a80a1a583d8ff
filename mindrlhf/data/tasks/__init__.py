"""Tasks by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.data.source import SourceRow
from mindrlhf.data.tasks.arithmetic import ARITHMETIC
from mindrlhf.data.tasks.calculator import CALCULATOR
from mindrlhf.data.tasks.conversation import conversation_key
from mindrlhf.data.tasks.countdown import COUNTDOWN
from mindrlhf.data.tasks.fields import FIELDS, GAME, mapped
from mindrlhf.data.tasks.gsm8k import GSM8K
from mindrlhf.data.tasks.multiplication import MULTIPLICATION
from mindrlhf.data.tasks.task import Task, TaskRow
from mindrlhf.data.tasks.verl import VERL
from mindrlhf.errors import UserError

TASKS = {task.name: task for task in (GSM8K, COUNTDOWN, ARITHMETIC, MULTIPLICATION, CALCULATOR, GAME, FIELDS, VERL)}


def get_task(name: str) -> Task:
    """Return the task called `name`; a UserError names the known ones."""
    if name not in TASKS:
        raise UserError(f"--dataset_type {name}: unknown; give one of {', '.join(TASKS)}.")
    return TASKS[name]


def parse_rows(rows: Sequence[SourceRow], name: str | None, fields: Sequence[str] = ()) -> tuple[Task, list[TaskRow]]:
    """Parse the rows of files by their task.

    name: the task's; None decides by the first row: verl's columns, a game's environment and seed, a conversation, a
    prompt or a ground truth that `fields` names (see `mapped`), else GSM8K. UserError, with its place, for a malformed
    row.
    """
    task = mapped(_task_of(rows[0].values, fields) if name is None else get_task(name), fields)
    parsed = []
    for row in rows:
        try:
            parsed.append(task.parse(row.values))
        except ValueError as error:
            raise UserError(f"{row.where}: not a {task.name} row: {error}.") from None
    return task, parsed


def _task_of(row: Mapping[str, Any], fields: Sequence[str]) -> Task:
    if "prompt" in row and {"data_source", "reward_model"} & set(row):
        return VERL
    theirs = dict(pair.partition("=")[::2] for pair in fields)
    if {"question", "environment", "seed"} <= set(row):
        return GAME
    own = "ground_truth" in theirs or conversation_key(row) or isinstance(row.get(theirs.get("question")), list)
    return FIELDS if own or isinstance(row.get("prompt"), str) else GSM8K
