"""Rollouts with their rewards as a MindRecord: what `--save_data_file` writes and `--replay` reads.

One row a response, in the order in which it was trained on: everything that training needs and generation made.
Advantages, reference and old log-probs are not here: a replay computes them from the settings it is given (a kept
group's old log-probs are the engine's).
"""

import json
from collections.abc import Iterable, Mapping
from itertools import groupby, pairwise
from pathlib import Path
from typing import get_args

import numpy as np
import orjson

from mindrlhf.data.mindrecord import read_columns, token_ids, write_columns
from mindrlhf.errors import UserError
from mindrlhf.files.json import is_number, parse_json
from mindrlhf.types import Experience, FinishReason, Prompt, Rollout, RolloutGroup

SCHEMA = {
    "step": {"type": "int64"},
    "prompt_id": {"type": "int64"},
    "sample_index": {"type": "int64"},
    "seed": {"type": "int64"},
    "finish_reason": {"type": "string"},
    "reward": {"type": "float32"},
    "kept": {"type": "int64"},  # 1 for a group that was left over from an earlier step
    "greedy_reward": {"type": "float32"},  # of the most probable response to the prompt; NaN where nothing needed it
    "rewards_by_function": {"type": "string"},  # JSON: name -> number, or null where the function gave none
    "fields": {"type": "string"},  # JSON: the prompt's task fields
    "prompt_ids": {"type": "int32", "shape": [-1]},
    "response_ids": {"type": "int32", "shape": [-1]},
    "behaviour_log_probs": {"type": "float32", "shape": [-1]},
    "policy_log_probs": {"type": "float32", "shape": [-1]},
}


def to_columns(step: int, experiences: Iterable[Experience]) -> dict[str, list]:
    """The columns of `SCHEMA`, with one value for each response of a step."""
    columns: dict[str, list] = {name: [] for name in SCHEMA}

    def add(experience: Experience, **values: list) -> None:
        """A value is one of each response, or one for all of them."""
        count = len(experience.group.rollouts)
        for name, given in values.items():
            columns[name] += given * count if len(given) == 1 else given

    for e in experiences:
        prompt, rollouts = e.group.prompt, e.group.rollouts
        by_function = zip(*(values.tolist() for values in e.rewards_by_function.values()), strict=True)
        names = tuple(e.rewards_by_function)
        texts = [orjson.dumps(dict(zip(names, given, strict=True))).decode() for given in by_function]  # NaN: null
        add(
            e,
            step=[step],
            prompt_id=[prompt.id],
            sample_index=[one.sample_index for one in rollouts],
            seed=[one.seed for one in rollouts],
            finish_reason=[one.finish_reason for one in rollouts],
            reward=e.rewards.tolist(),
            kept=[int(e.kept)],
            greedy_reward=[np.nan if e.greedy_reward is None else float(e.greedy_reward)],
            rewards_by_function=texts or ["{}"],
            fields=[json.dumps(dict(prompt.fields))],
            prompt_ids=[prompt.token_ids],
            response_ids=[one.response_ids for one in rollouts],
            behaviour_log_probs=[one.behaviour_log_probs for one in rollouts],
            policy_log_probs=[one.policy_log_probs for one in rollouts],
        )
    return columns


def rows_of(columns: Mapping[str, list]) -> list[dict]:
    """One dict for each response."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def write_rollout_record(path: str | Path, rows: Iterable[dict]) -> int:
    """Writes `rows_of` columns atomically; returns how many."""
    return write_columns(path, SCHEMA, rows)


def read_rows(path: str | Path) -> list[dict]:
    """The rows in the order written, as `rows_of` gave them. UserError as `read_columns`."""
    columns = read_columns(path, list(SCHEMA))
    for name in ("reward", "greedy_reward"):
        columns[name] = [float(value) for value in columns[name]]  # MindSpore reads 1.0 as the whole number 1
    return rows_of(columns)


def read_rollout_record(path: str | Path) -> list[tuple[int, list[Experience]]]:
    """(step, its experiences with zero advantages), in the order written. UserError as `read_columns`."""
    try:
        steps = from_rows(read_rows(path))
        for (earlier, _), (later, _) in pairwise(steps):
            if later <= earlier:
                raise ValueError(f"step {later} after step {earlier}")
        return steps
    except ValueError as error:
        raise UserError(
            f"{path}: holds no rollouts that a run wrote ({error}); give a file of --save_data_file."
        ) from None


def from_rows(rows: Iterable[dict]) -> list[tuple[int, list[Experience]]]:
    """The inverse of `to_columns`, by rows, over consecutive steps, advantages and all that follows left out.

    Raises ValueError, saying of which step and prompt, for a row that `to_columns` cannot have given.
    """
    steps = []
    for step, members in groupby(rows, lambda row: row["step"]):
        # A group ends where the sample index starts anew: the same prompt may come twice in a step.
        groups: list[list[dict]] = []
        for row in members:
            if (
                not groups
                or row["sample_index"] <= groups[-1][-1]["sample_index"]
                or row["prompt_id"] != groups[-1][0]["prompt_id"]
            ):
                groups.append([])
            groups[-1].append(row)
        steps.append((step, [_sound_experience(group) for group in groups]))
    return steps


def _sound_experience(rows: list[dict]) -> Experience:
    try:
        for row in rows:
            _check(row)
        return _experience(rows)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        where = f"step {rows[0]['step']}, prompt {rows[0]['prompt_id']}"
        raise ValueError(f"{where}: {error}") from None


def _check(row: dict) -> None:
    """Raises ValueError, or what a wrong type leads to, for values that no run writes."""
    response = token_ids(row["response_ids"])
    if not (len(response) and len(token_ids(row["prompt_ids"]))):
        raise ValueError("a prompt or response is empty")
    for name in ("behaviour_log_probs", "policy_log_probs"):
        if row[name].shape != response.shape or not np.isfinite(row[name]).all():
            raise ValueError(f"{name} are not {len(response)} finite numbers, one for each token")
    if row["finish_reason"] not in get_args(FinishReason):
        raise ValueError(f"finish_reason is {row['finish_reason']!r:.40}")
    if not all(isinstance(text, str) for text in parse_json(row["fields"]).values()):
        raise ValueError("a task field is not text")
    if not all(value is None or is_number(value) for value in parse_json(row["rewards_by_function"]).values()):
        raise ValueError("a function's reward is not a number")


def _experience(rows: list[dict]) -> Experience:
    first = rows[0]
    prompt = Prompt(first["prompt_id"], first["prompt_ids"], parse_json(first["fields"]))
    rollouts = tuple(
        Rollout(
            prompt_id=row["prompt_id"],
            sample_index=row["sample_index"],
            response_ids=row["response_ids"],
            behaviour_log_probs=row["behaviour_log_probs"],
            policy_log_probs=row["policy_log_probs"],
            finish_reason=row["finish_reason"],
            seed=row["seed"],
        )
        for row in rows
    )
    by_function = [parse_json(row["rewards_by_function"]) for row in rows]
    return Experience(
        group=RolloutGroup(prompt, rollouts),
        rewards=np.array([row["reward"] for row in rows], np.float32),
        rewards_by_function={
            name: np.array([np.nan if given[name] is None else given[name] for given in by_function], np.float32)
            for name in by_function[0]
        },
        advantages=np.zeros(len(rows), np.float32),
        kept=bool(first["kept"]),
        greedy_reward=first["greedy_reward"],
        old_log_probs=tuple(rollout.policy_log_probs for rollout in rollouts) if first["kept"] else None,
    )
