"""Problems in verl's columns: `data_source, prompt, ability, reward_model, extra_info`.

prompt: chat messages; reward_model: `{"style", "ground_truth"}`, the latter optional; extra_info: anything, by
convention with `split`, `index`, and the bare `question` and `answer`.
"""

import json
from collections.abc import Mapping
from typing import Any

from mindrlhf.data.tasks.conversation import checked
from mindrlhf.data.tasks.task import Task, TaskRow

ABILITY = "math"  # verl's usual value for problems like our own tasks
# Our task -> its name and instruction in verl's own files; other tasks keep ours.
NAMED = {"gsm8k": ("openai/gsm8k", 'Let\'s think step by step and output the final answer after "####".')}


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse a row with these columns.

    The worked answer is a text `extra_info.answer`. extra: data_source, ability, style, and extra_info as JSON text.
    """
    messages, extra_info = checked(row.get("prompt"), "prompt"), row.get("extra_info") or {}
    reward_model = {} if row.get("reward_model") is None else row["reward_model"]
    if not isinstance(reward_model, Mapping):
        raise ValueError(f"key 'reward_model' should be a group with a 'ground_truth', and is {reward_model!r}")
    truth = reward_model.get("ground_truth")
    truth = "" if truth is None else truth
    answer = extra_info.get("answer") if isinstance(extra_info, Mapping) else None
    named = {name: str(row[name]) for name in ("data_source", "ability") if row.get(name)}
    return TaskRow(
        question=messages[-1]["content"],
        answer=answer if isinstance(answer, str) else "",
        ground_truth=truth if isinstance(truth, str) else json.dumps(truth, ensure_ascii=False),
        extra={
            **named,
            "style": str(reward_model.get("style", "rule")),
            "extra_info": json.dumps(extra_info, ensure_ascii=False, default=str),
        },
        messages=messages,
    )


def record(index: int, row: TaskRow, task: Task, split: str) -> dict[str, Any]:
    """Write a problem of any task in these columns, as verl's own converters do.

    A problem from a row of this form keeps its data_source, ability, style and extra_info.
    """
    source, instruction = NAMED.get(task.name, (task.name, task.instruction))
    content = f"{row.question} {instruction}" if instruction else row.question
    own = {"split": split, "index": index, "question": row.question, "answer": row.answer}
    return {
        "data_source": row.extra.get("data_source", source),
        "prompt": row.messages or [{"role": "user", "content": content}],
        "ability": row.extra.get("ability", ABILITY),
        "reward_model": {"style": row.extra.get("style", "rule"), "ground_truth": row.ground_truth},
        "extra_info": json.loads(row.extra["extra_info"]) if "extra_info" in row.extra else own,
    }


VERL = Task(name="verl", instruction="", reward="math", parse=parse)
