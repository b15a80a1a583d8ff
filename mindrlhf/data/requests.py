"""Requests of `mindrlhf generate`: prompts of a file, or typed ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.chat import family_chat, write_prompts
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.source import SourceRow, read_source
from mindrlhf.data.tasks.task import TaskRow
from mindrlhf.data.templates import prompt_texts
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.rewards.columns import encode, json_ready
from mindrlhf.types import Prompt

Request = tuple[Prompt, Mapping[str, Any]]
"""Prompt and its source row; the row's fields are written with the responses."""


def read_requests(
    path: str | Path, tokenizer: Tokenizer, limit: int | None = None, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Request]:
    """Read the prompts of a file in order, at most `limit`.

    A row has `prompt` (text taken as it is, or messages) or `messages`; the row number selects its random numbers, as
    does the row index of a MindRecord (named .mindrecord, or with a .db file alongside). UserError for a file that
    cannot be read, and, with its line, for a row without a prompt. tools: JSON schemas listed in prompts of messages.
    """
    path = Path(path)
    if path.suffix == ".mindrecord" or path.with_name(path.name + ".db").is_file():
        prompts = read_prompts(path, tokenizer)[:limit]
        return [(prompt, {"prompt": tokenizer.decode(prompt.token_ids), **prompt.fields}) for prompt in prompts]
    rows = read_source(path, limit)
    return _encoded(rows, write_prompts([(_given(row), row.where) for row in rows], tokenizer, tools), tokenizer)


def typed_requests(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    template: str | None = None,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Request]:
    """Write texts as users' questions. template, system, tools: see `prompt_texts`."""
    if template is None and tokenizer.chat_template is None and family_chat(tokenizer) is None:
        raise UserError("the tokenizer has no chat template; give --template plain, or another one.")
    rows = [SourceRow({"prompt": text}, f"--prompt {text!r:.40}") for text in texts]
    asked, places = [TaskRow(text, "", "") for text in texts], [row.where for row in rows]
    return _encoded(rows, prompt_texts(asked, places, "", template, system, tokenizer, tools), tokenizer)


def _encoded(rows: Sequence[SourceRow], texts: Sequence[str], tokenizer: Tokenizer) -> list[Request]:
    encoded = tokenizer.encode_batch(texts)
    for row, ids in zip(rows, encoded, strict=True):
        if not ids:
            raise UserError(f"{row.where}: the prompt is empty; give it a text.")
    return [
        (Prompt(number, np.array(ids, np.int32), encode(row.values)), json_ready(row.values))
        for number, (row, ids) in enumerate(zip(rows, encoded, strict=True))
    ]


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
