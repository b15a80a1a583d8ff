"""Tasks by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from mindrlhf.data.tasks.arithmetic import ARITHMETIC
from mindrlhf.data.tasks.conversation import conversation_key
from mindrlhf.data.tasks.countdown import COUNTDOWN
from mindrlhf.data.tasks.fields import FIELDS, mapped
from mindrlhf.data.tasks.gsm8k import GSM8K
from mindrlhf.data.tasks.multiplication import MULTIPLICATION
from mindrlhf.data.tasks.task import Task
from mindrlhf.data.tasks.verl import VERL
from mindrlhf.errors import UserError

TASKS = {task.name: task for task in (GSM8K, COUNTDOWN, ARITHMETIC, MULTIPLICATION, FIELDS, VERL)}


def get_task(name: str) -> Task:
    """Return the task called `name`; a UserError names the known ones."""
    if name not in TASKS:
        raise UserError(f"--dataset_type {name}: unknown; give one of {', '.join(TASKS)}.")
    return TASKS[name]


def chosen_task(name: str | None, fields: Sequence[str], row: Mapping[str, Any]) -> Task:
    """Choose the task of a file's rows, with their own keys.

    name: as given. Without one, `row`, the file's first, decides: verl's columns, a conversation or a ground truth that
    `fields` names, else GSM8K. fields: see `mapped`. Raises UserError as `get_task` and `mapped`.
    """
    if name is not None:
        return mapped(get_task(name), fields)
    theirs = dict(pair.partition("=")[::2] for pair in fields)
    if "prompt" in row and {"data_source", "reward_model"} & set(row):
        return mapped(VERL, fields)
    own = "ground_truth" in theirs or conversation_key(row) or isinstance(row.get(theirs.get("question")), list)
    return mapped(FIELDS if own else GSM8K, fields)
