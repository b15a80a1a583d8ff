"""The tasks by name."""

from mindrlhf.data.tasks.arithmetic import ARITHMETIC
from mindrlhf.data.tasks.countdown import COUNTDOWN
from mindrlhf.data.tasks.fields import FIELDS
from mindrlhf.data.tasks.gsm8k import GSM8K
from mindrlhf.data.tasks.multiplication import MULTIPLICATION
from mindrlhf.data.tasks.task import Task
from mindrlhf.data.tasks.verl import VERL
from mindrlhf.errors import UserError

TASKS = {task.name: task for task in (GSM8K, COUNTDOWN, ARITHMETIC, MULTIPLICATION, FIELDS, VERL)}


def get_task(name: str) -> Task:
    """The task called `name`; UserError naming the known ones."""
    if name not in TASKS:
        raise UserError(f"--dataset_type {name}: unknown; give one of {', '.join(TASKS)}.")
    return TASKS[name]
