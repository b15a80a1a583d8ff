"""Problems in verl's columns: `data_source, prompt, ability, reward_model, extra_info`.

prompt: chat messages; reward_model: `{"style", "ground_truth"}`, the latter optional; extra_info: anything, by
convention with `split`, `index`, and the bare `question` and `answer`.
"""

from collections.abc import Mapping
from typing import Any

from mindrlhf.data.tasks.task import Task, TaskRow, text_field

COLUMNS = (
    "data_source",
    "ability",
    "style",
    "reward_model",
    "extra_info",
    "ground_truth",
)  # of a row, in places of their own
ABILITY = "math"  # verl's usual value for problems like our own tasks
# Our task -> its name and instruction in verl's own files; other tasks keep ours.
NAMED = {"gsm8k": ("openai/gsm8k", 'Let\'s think step by step and output the final answer after "####".')}


def parse(row: Mapping[str, Any]) -> TaskRow:
    """Parse a row with these columns, whose prompt is its own.

    The worked answer is a text `extra_info.answer`. The ground truth keeps its type.
    """
    extra_info = row.get("extra_info")
    reward_model = {} if row.get("reward_model") is None else row["reward_model"]
    if not isinstance(reward_model, Mapping):
        raise ValueError(f"key 'reward_model' should be a group with a 'ground_truth', and is {reward_model!r}")
    answer = extra_info.get("answer") if isinstance(extra_info, Mapping) else None
    return TaskRow(
        question=text_field(row, "question"),
        answer=answer if isinstance(answer, str) else "",
        ground_truth=reward_model.get("ground_truth"),
        extra={"style": str(reward_model.get("style", "rule"))},
    )


def record(index: int, row: TaskRow, task: Task, split: str) -> dict[str, Any]:
    """Write a problem of any task in these columns, as verl's own converters do.

    A problem from a row of this form keeps its data_source, ability, style and extra_info. All other columns of a row
    go into extra_info, which verl hands to reward functions.
    """
    source, instruction = NAMED.get(task.name, (task.name, task.instruction))
    content = f"{row.question} {instruction}" if instruction else row.question
    truth = "" if row.ground_truth is None else row.ground_truth
    own = {"split": split, "index": index, "question": row.question, "answer": row.answer}
    others = {name: value for name, value in row.extra.items() if name not in COLUMNS}
    return {
        "data_source": row.extra.get("data_source") or source,
        "prompt": row.messages or [{"role": "user", "content": content}],
        "ability": row.extra.get("ability") or ABILITY,
        "reward_model": {"style": row.extra.get("style", "rule"), "ground_truth": truth},
        "extra_info": (row.extra.get("extra_info") or own) | others,
    }


VERL = Task(name="verl", instruction="", reward="math", parse=parse)
