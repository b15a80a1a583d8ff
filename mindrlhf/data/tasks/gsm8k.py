"""GSM8K (Cobbe et al. 2021): word problems with answers ending in `#### N`."""

from collections.abc import Mapping
from typing import Any

from mindrlhf.data.tasks.task import Task, TaskRow, text_field
from mindrlhf.rewards.answers import MARK


def final_answer(answer: str) -> str:
    """Extract the text after the last `####`; ValueError without one."""
    _, mark, tail = answer.rpartition(MARK)
    number = "".join(tail.replace(",", "").split())
    if not mark or not number:
        raise ValueError(f"key 'answer' has no final answer after {MARK}")
    return number


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse `question` and `answer`."""
    answer = text_field(row, "answer")
    return TaskRow(text_field(row, "question"), answer, final_answer(answer))


_FINISH = f'Think step by step, and finish with "{MARK} " and the final number.'
GSM8K = Task(name="gsm8k", instruction=_FINISH, reward="gsm8k", parse=parse)
