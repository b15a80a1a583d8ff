"""What was sampled and how it was rewarded, as text: one JSONL file for each step."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.files.atomic import atomic_file
from mindrlhf.types import Experience

ROLLOUTS_FOLDER = "rollouts"  # of a run's output folder
STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


def rollout_rows(
    step: int, experiences: Sequence[Experience], decode: Callable[[np.ndarray], str]
) -> list[dict[str, Any]]:
    """One dict of plain values for each response, in reading order: what was asked, what came, what it was worth.

    decode: int32[n] token ids -> text, special tokens included.
    Keys: step, prompt_id, sample_index, prompt, completion, ground_truth (None where the task has none), reward,
    rewards (by function, unweighted), advantage (mean over its tokens), finish_reason, prompt_length and
    response_length (tokens).
    """
    rows = []
    for experience in experiences:
        prompt = experience.group.prompt
        text = decode(prompt.token_ids)
        advantages = experience.advantages
        advantages = [float(row.mean()) for row in advantages] if isinstance(advantages, tuple) else advantages.tolist()
        rewards = experience.rewards.tolist()
        by_function = {name: given.tolist() for name, given in experience.rewards_by_function.items()}
        for index, rollout in enumerate(experience.group.rollouts):
            rows.append(
                {
                    "step": step,
                    "prompt_id": int(prompt.id),
                    "sample_index": int(rollout.sample_index),
                    "prompt": text,
                    "completion": decode(rollout.response_ids),
                    "ground_truth": prompt.fields.get("ground_truth"),
                    "reward": rewards[index],
                    "rewards": {name: given[index] for name, given in by_function.items()},
                    "advantage": advantages[index],
                    "finish_reason": rollout.finish_reason,
                    "prompt_length": len(prompt.token_ids),
                    "response_length": len(rollout.response_ids),
                }
            )
    return rows


def rollout_file(folder: Path, step: int) -> Path:
    """Where the rollouts of a step lie: `<folder>/step_000012.jsonl`."""
    return Path(folder) / f"step_{step:06d}.jsonl"


def rollout_steps(folder: Path) -> list[int]:
    """Steps whose rollouts lie in the folder, in order; none where there is no such folder."""
    found = (STEP_FILE.fullmatch(path.name) for path in Path(folder).glob("step_*.jsonl"))
    return sorted(int(name[1]) for name in found if name)


def write_rollouts(folder: Path, step: int, lines: bytes) -> Path:
    """Write the rows of one step (`files.json.json_lines`) and return the file, which appears whole or not at all."""
    path = rollout_file(folder, step)
    with atomic_file(path, durable=False) as temporary:
        temporary.write_bytes(lines)
    return path
