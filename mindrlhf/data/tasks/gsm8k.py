"""GSM8K (Cobbe et al. 2021): word problems with answers ending in `#### N`."""

import re
from collections.abc import Mapping
from typing import Any

from mindrlhf.data.tasks.task import Task, TaskRow, text_field
from mindrlhf.rewards import numbers
from mindrlhf.rewards.answers import MARK


def final_answer(answer: str) -> str:
    """Extract the number after the last `####`, without signs of units; ValueError without one."""
    _, mark, tail = answer.rpartition(MARK)
    line = tail.strip().partition("\n")[0]
    if not mark or not line.strip(", "):
        raise ValueError(f"key 'answer' has no final answer after {MARK}")
    number = numbers.stated(line)
    if number is None:
        raise ValueError(f"key 'answer' has {line[:80]!r} after {MARK}, which gives no number")
    written = line.replace(",", "")
    return written if re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", written) else str(number)


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse `question` and `answer`."""
    answer = text_field(row, "answer")
    return TaskRow(text_field(row, "question"), answer, final_answer(answer))


_FINISH = f'Think step by step, and finish with "{MARK} " and the final number.'
GSM8K = Task(name="gsm8k", instruction=_FINISH, reward="gsm8k", parse=parse)
