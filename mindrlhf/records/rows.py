"""The record of responses: one row for each, the source of all files.

`--save_data_file` (MindRecord) has the columns of SCHEMA, for `--replay`: `policy_step` is below `step` for a group
that was carried over, `occurrence` is its prompt's, `greedy_reward` is NaN if nothing needed it; `rewards_by_function`,
`notes` (texts of reward functions), `fields` and `token_figures` are JSON. Arrays of tokens follow `token_arrays`.
`rollouts/` (JSONL) has TEXT_KEYS, for people: `rewards` are unweighted, `advantage` is the mean over sampled
tokens, `response_length` their number; `reward_notes` are there if a function gave any. A conversation has `turns`
there, too: its parts in order, [true if the policy drew it, text]. A prompt with pictures has their names,
`images`: the files `images/NAME.png` beside the JSONL show them as the model gets them. A conversation in which tools
show pictures has theirs by turn, `turn_images`; in its texts each is one token. The MindRecord has their pixels.

Some answers (`trainer.token_figures`) have figures for each token: `advantage`, and from the step's last update on it
the probability `ratio` to the policy that began the step, `entropy` in nats, and `clipped`, 1 where the loss was
clipped. They mean nothing on tokens that were not sampled. Without figures, `token_figures` is {} and JSONL has no
`tokens`; otherwise `tokens` has the figures, and `text` and `sampled` (0 or 1) of each token.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from io import BytesIO
from itertools import groupby
from typing import Any, get_args

import numpy as np
import orjson

from mindrlhf.data.mindrecord import token_ids
from mindrlhf.files.json import is_number, is_whole, parse_json
from mindrlhf.records.pictures import NOTHING, restored_pictures, stored_pictures
from mindrlhf.token_arrays import RECORDED, TokenArray
from mindrlhf.types import Experience, FinishReason, Prompt, Rollout, RolloutGroup

Row = Mapping[str, Any]

_INTEGER, _FLOAT, _TEXT = {"type": "int64"}, {"type": "float64"}, {"type": "string"}
_IDS = {"type": "int32", "shape": [-1]}
_FORMS = {"bytes": {"type": "bytes"}, "json": _TEXT, "npy": {"type": "bytes"}}
SCHEMA = {
    **dict.fromkeys(("step", "prompt_id", "occurrence", "sample_index", "seed", "policy_step"), _INTEGER),
    "finish_reason": _TEXT,
    **dict.fromkeys(("reward", "greedy_reward"), _FLOAT),
    **dict.fromkeys(("rewards_by_function", "notes", "fields", "token_figures", "pictures"), _TEXT),
    **dict.fromkeys(("prompt_ids", "response_ids"), _IDS),
    **{one.name: _FORMS.get(one.column) or {"type": np.dtype(one.dtype).name, "shape": [-1]} for one in RECORDED},
}
# Columns that earlier versions did not write.
ADDED = {"policy_step", "occurrence", "token_figures", "notes", "pictures"}
ADDED |= {array.name for array in RECORDED if array.absent is not None}
CARRIED = "kept"  # int64, before `policy_step`: 1 for a group that was carried over from an earlier step

TEXT_KEYS = ("step", "prompt_id", "sample_index", "prompt", "completion", "ground_truth")
TEXT_KEYS += ("reward", "rewards", "advantage", "finish_reason", "prompt_length", "response_length")
FURTHER_TEXT_KEYS = ("turns", "tokens", "reward_notes", "images", "turn_images")  # of some rows


def rows_of(
    step: int, experiences: Iterable[Experience], decode: Callable[[np.ndarray], str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield a row with all columns of SCHEMA for each response; `sampled`: bool[R].

    decode: int32[n] token ids -> text, special tokens included; with it a row has TEXT_KEYS too.
    """
    for e in experiences:
        prompt = e.group.prompt
        shared = {
            "step": step,
            "prompt_id": int(prompt.id),
            "occurrence": prompt.occurrence,
            "policy_step": e.policy_step,
            "greedy_reward": np.nan if e.greedy_reward is None else float(e.greedy_reward),
            "fields": json.dumps(dict(prompt.fields)),
            "prompt_ids": prompt.token_ids,
        }
        if decode:
            shared |= {
                "prompt": decode(prompt.text_ids),
                "ground_truth": prompt.fields.get("ground_truth"),
                "prompt_length": len(prompt.token_ids),
            }
            if prompt.pictures:
                shared["images"] = [picture.name for picture in prompt.pictures]
        rows = zip(e.group.rollouts, e.rewards.tolist(), e.advantages.tolist(), strict=True)
        for index, (rollout, reward, advantage) in enumerate(rows):
            rewards = {name: float(values[index]) for name, values in e.rewards_by_function.items()}
            row = shared | {"reward": reward, "rewards": rewards}
            row |= {name: getattr(rollout, name) for name in ("response_ids", "finish_reason", "seed")}
            row |= {array.name: _stored(array, rollout) for array in RECORDED}
            row["sample_index"] = int(rollout.sample_index)
            row["pictures"] = stored_pictures(rollout.pictures)
            row["rewards_by_function"] = orjson.dumps(rewards).decode()  # NaN: null
            notes = e.notes[index] if e.notes else {}
            row["notes"] = orjson.dumps(notes).decode()
            figures = e.token_figures[index] if e.token_figures else {}
            row["token_figures"] = orjson.dumps(figures, option=orjson.OPT_SERIALIZE_NUMPY).decode()
            if decode:
                row["completion"] = decode(rollout.text_ids)
                if not rollout.sampled.all():
                    row["turns"] = turns_of(rollout, decode)
                if rollout.pictures:
                    row["turn_images"] = turn_images(rollout)
                if notes:
                    row["reward_notes"] = notes
                if figures:
                    row["tokens"] = _tokens(rollout, decode) | parse_json(row["token_figures"])
                row["advantage"] = advantage
                row["response_length"] = int(np.count_nonzero(rollout.sampled))
            yield row


def _stored(array: TokenArray, rollout: Rollout) -> np.ndarray | str:
    """Return a response's array [R], its file's bytes, or its JSON."""
    values = rollout.row(array.name)
    if array.column == "npy":
        return npy_bytes(values)
    if array.column != "json":
        return values
    places = np.flatnonzero(~np.isnan(values))
    return orjson.dumps(list(zip(places.tolist(), values[places].tolist(), strict=True))).decode()


def npy_bytes(values: np.ndarray) -> np.ndarray:
    """Write an array as a file of NumPy's: uint8[n].

    It is one 0 for an array without numbers.
    """
    if not values.size:
        return np.zeros(1, np.uint8)
    buffer = BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return np.frombuffer(buffer.getvalue(), np.uint8)


def npy_array(content: np.ndarray) -> np.ndarray | None:
    """Invert `npy_bytes`; None for an array without numbers, ValueError for other bytes."""
    if content.tolist() == [0]:
        return None
    try:
        return np.lib.format.read_array(BytesIO(content.tobytes()), allow_pickle=False)
    except (EOFError, MemoryError) as error:
        raise ValueError(str(error)) from None


def turns_of(rollout: Rollout, decode: Callable[[np.ndarray], str]) -> list[tuple[bool, str]]:
    """Cut a conversation into parts (True if the policy drew it, text)."""
    borders = turn_borders(rollout)
    parts = zip(*(np.split(array, borders) for array in (rollout.response_ids, rollout.written)), strict=True)
    texts = (decode(ids[written]) for ids, written in parts)
    return [(bool(rollout.sampled[first]), text) for first, text in zip((0, *borders), texts, strict=True)]


def turn_borders(rollout: Rollout) -> np.ndarray:
    """Find the first token of each part of a conversation but the first part."""
    return np.flatnonzero(np.diff(rollout.sampled)) + 1


def turn_images(rollout: Rollout) -> list[list[str]]:
    """Name the pictures of each part of a conversation."""
    borders = turn_borders(rollout)
    names: list[list[str]] = [[] for _ in range(len(borders) + 1)]
    for place, picture in rollout.pictures.items():
        names[int(np.searchsorted(borders, place, "right"))].append(picture.name)
    return names


def _tokens(rollout: Rollout, decode: Callable[[np.ndarray], str]) -> dict[str, list]:
    texts = token_texts(rollout.response_ids, decode)
    texts = [text if written else "" for text, written in zip(texts, rollout.written.tolist(), strict=True)]
    return {"text": texts, "sampled": rollout.sampled.astype(int).tolist()}


def token_texts(ids: np.ndarray, decode: Callable[[np.ndarray], str]) -> list[str]:
    """Cut a text at its tokens' ends."""
    texts: list[str] = []
    begin = whole = 0  # token `begin` is decoded again with the next ones, for a tokenizer that drops a leading space
    known = ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        if text.endswith("\ufffd") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(known) :])
        begin, whole = whole, end
        known = decode(ids[begin:whole])
    return texts


def text_row(row: Row) -> dict[str, Any]:
    """Select the keys that people read."""
    return {name: row[name] for name in (*TEXT_KEYS, *(key for key in FURTHER_TEXT_KEYS if key in row))}


def completed(row: dict[str, Any]) -> dict[str, Any]:
    """Complete a stored row of any version to all columns of SCHEMA."""
    row.setdefault("policy_step", row["step"] - row.pop(CARRIED, 0))
    row.setdefault("occurrence", 0)
    row.setdefault("token_figures", "{}")
    row.setdefault("notes", "{}")
    row.setdefault("pictures", NOTHING)
    for array in RECORDED:
        if array.name not in row:
            row[array.name] = _absent(array, len(row["response_ids"]))
    return {name: row[name] for name in SCHEMA}


def _absent(array: TokenArray, length: int) -> np.ndarray | str:
    """Return what a row without an array has stored."""
    if array.column == "json":
        return "[]"
    values = array.filled(length)
    return npy_bytes(values) if array.column == "npy" else values


def experiences_of(
    rows: Iterable[Row], prompts: Mapping[int, Prompt] | None = None
) -> list[tuple[int, list[Experience]]]:
    """Invert `rows_of` over steps, with zero advantages; ValueError for rows that no run writes.

    prompts: those with pictures, by id: rows have none of prompts, and get theirs.
    """
    steps = []
    for step, members in groupby(rows, lambda row: row["step"]):
        # A group ends where the sample index starts again: the same prompt may come twice in a step.
        groups: list[list[Row]] = []
        prompt = None
        index = 0
        for row in members:
            own = (row["prompt_id"], row["occurrence"])
            if own != prompt or row["sample_index"] <= index:
                groups.append([])
            groups[-1].append(row)
            prompt = own
            index = row["sample_index"]
        steps.append((step, [_sound_experience(group, prompts or {}) for group in groups]))
    return steps


def _sound_experience(rows: list[Row], prompts: Mapping[int, Prompt]) -> Experience:
    try:
        for row in rows:
            _check(row)
        return _experience(rows, prompts)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        where = f"step {rows[0]['step']}, prompt {rows[0]['prompt_id']}"
        raise ValueError(f"{where}: {error}") from None


def _check(row: Row) -> None:
    """Raise ValueError, or a wrong type's error, for values that no run writes."""
    response = token_ids(row["response_ids"])
    prompt = token_ids(row["prompt_ids"])
    if not (len(response) and len(prompt)):
        raise ValueError("a prompt or response is empty")
    for array in RECORDED:
        if array.column == "npy":
            _check_wide(array.name, npy_array(row[array.name]), len(prompt) - 1 if array.of_prompt else len(response))
        else:
            _check_array(array.name, row[array.name], len(response), row["sampled"])
    if row["finish_reason"] not in get_args(FinishReason):
        raise ValueError(f"finish_reason is {row['finish_reason']!r:.40}")
    if row["policy_step"] > row["step"]:
        raise ValueError(f"policy_step is {row['policy_step']}, which comes after the step")
    if row["occurrence"] < 0:
        raise ValueError(f"occurrence is {row['occurrence']}, and counts from 0")
    if not all(isinstance(text, str) for text in parse_json(row["fields"]).values()):
        raise ValueError("a task field is not text")
    if not all(value is None or is_number(value) for value in parse_json(row["rewards_by_function"]).values()):
        raise ValueError("a function's reward is not a number")
    for texts in parse_json(row["notes"]).values():
        if not all(isinstance(text, str) for text in texts.values()):
            raise ValueError("a reward function's note is not text")


def _check_array(name: str, values: np.ndarray | str, length: int, sampled: np.ndarray) -> None:
    if isinstance(values, str):
        for place, value in parse_json(values):
            known = is_whole(place) and 0 <= place < length and sampled[place]
            if not (known and is_number(value) and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r:.40} at {place!r:.40}")
    elif values.shape != (length,):
        raise ValueError(f"{name} has {values.size} values for {length} tokens")
    elif not np.isfinite(values[sampled]).all():
        raise ValueError(f"{name} are not {length} finite numbers, one for each token")


def _check_wide(name: str, values: np.ndarray | None, length: int) -> None:
    if values is None:
        return
    if values.ndim != 2 or len(values) != length or values.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"{name} is {values.dtype}{list(values.shape)}, and has {length} rows of small whole numbers")


def _is_there(array: TokenArray, row: Row) -> bool:
    """Test whether a row has an array of numbers or booleans."""
    if array.column == "array" and array.absent is not None:
        return bool((row[array.name] != array.absent).any())
    return array.column in ("array", "bytes")


def _rollout(row: Row) -> Rollout:
    arrays = {array.name: row[array.name] for array in RECORDED if _is_there(array, row)}
    files = ((array.name, npy_array(row[array.name])) for array in RECORDED if array.column == "npy")
    arrays |= {name: values for name, values in files if values is not None}
    values = {array.name: dict(parse_json(row[array.name])) for array in RECORDED if array.column == "json"}
    names = ("prompt_id", "sample_index", "response_ids", "finish_reason", "seed")
    pictures = restored_pictures(row["pictures"], len(row["response_ids"]))
    return Rollout(**{name: row[name] for name in names}, tokens=arrays, pictures=pictures).with_values(values)


def _experience(rows: list[Row], prompts: Mapping[int, Prompt]) -> Experience:
    first = rows[0]
    prompt = Prompt(first["prompt_id"], first["prompt_ids"], parse_json(first["fields"]), first["occurrence"])
    if prompt.id in prompts:
        prompt = prompt.showing(prompts[prompt.id])
    rollouts = tuple(map(_rollout, rows))
    given = [parse_json(row["rewards_by_function"]) for row in rows]
    notes = tuple(parse_json(row["notes"]) for row in rows)
    by_function = {name: [np.nan if one[name] is None else one[name] for one in given] for name in given[0]}
    return Experience(
        group=RolloutGroup(prompt, rollouts),
        rewards=np.array([row["reward"] for row in rows], np.float64),
        rewards_by_function={name: np.array(values, np.float64) for name, values in by_function.items()},
        advantages=np.zeros(len(rows), np.float32),
        policy_step=first["policy_step"],
        notes=notes if any(notes) else (),
        greedy_reward=first["greedy_reward"],
    )
