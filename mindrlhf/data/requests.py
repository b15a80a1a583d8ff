"""Requests of `mindrlhf generate`: prompts of a JSONL, JSON, parquet or MindRecord file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.chat import write_prompts
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.source import SourceRow, read_source
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.types import Prompt

Request = tuple[Prompt, Mapping[str, Any]]
"""Prompt and its source row, whose fields return with the responses."""


def read_requests(path: str | Path, tokenizer: Tokenizer, limit: int | None = None) -> list[Request]:
    """Read the prompts of a file in order, at most `limit`.

    A row has `prompt` (text taken as it is, or messages) or `messages`; its number keys the random numbers, as the row
    index of a MindRecord (named .mindrecord, or with a .db file alongside) does. UserError for a file that cannot be
    read, and, with its line, for a row without a prompt.
    """
    path = Path(path)
    if path.suffix == ".mindrecord" or path.with_name(path.name + ".db").is_file():
        prompts = read_prompts(path, tokenizer)[:limit]
        return [(prompt, {"prompt": tokenizer.decode(prompt.token_ids), **prompt.fields}) for prompt in prompts]
    rows = read_source(path)[:limit]
    encoded = tokenizer.encode_batch(write_prompts([(_given(row), row.where) for row in rows], tokenizer))
    for row, ids in zip(rows, encoded, strict=True):
        if not ids:
            raise UserError(f"{row.where}: the prompt is empty; give it a text.")
    prompts = [Prompt(number, np.array(ids, np.int32)) for number, ids in enumerate(encoded)]
    return [(prompt, row.values) for prompt, row in zip(prompts, rows, strict=True)]


def _given(row: SourceRow) -> Any:
    """Return the row's text or messages."""
    given = [key for key in ("prompt", "messages") if row.values.get(key) is not None]
    if len(given) != 1:
        found = "both" if given else f"only {', '.join(row.values)}" if row.values else "nothing"
        raise UserError(f"{row.where}: should have either prompt or messages, and has {found}.")
    value = row.values[given[0]]
    if given == ["messages"] and isinstance(value, str):
        raise UserError(f"{row.where}: messages should be a list, and is text; call the key prompt.")
    return value
