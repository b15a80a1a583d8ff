"""Requests of `mindrlhf generate`: prompts of a file, or typed ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.chat import family_chat, write_prompts
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.source import SourceRow, read_source
from mindrlhf.data.tasks import parse_rows
from mindrlhf.data.tasks.task import TaskRow, prompt_fields
from mindrlhf.data.templates import prompt_ids
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.rewards.columns import json_ready
from mindrlhf.types import Prompt

Request = tuple[Prompt, Mapping[str, Any]]
"""Prompt and its source row; the row's fields are written with the responses."""


def read_requests(
    path: str | Path,
    tokenizer: Tokenizer,
    limit: int | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[Request]:
    """Read the prompts of a file in order, at most `limit`.

    Rows are read as a training reads them (`parse_rows`). The row number selects random numbers, as does the row index
    of a MindRecord (named .mindrecord, or with a .db file alongside). UserError for a file that cannot be read, and,
    with its line, for a row without a prompt. tools: JSON schemas listed in prompts of messages.
    variables: additional ones of the chat template.
    """
    path = Path(path)
    if path.suffix == ".mindrecord" or path.with_name(path.name + ".db").is_file():
        prompts = read_prompts(path, tokenizer)[:limit]
        return [(prompt, {"prompt": tokenizer.decode(prompt.token_ids), **prompt.fields}) for prompt in prompts]
    rows = read_source(path, limit)
    task, problems = parse_rows(rows, None)
    places = [row.where for row in rows]
    written = prompt_ids(problems, places, task.instruction, None, None, tokenizer, tools, variables)
    return _numbered(rows, written, [prompt_fields(task.name, problem) for problem in problems])


def typed_requests(
    texts: Sequence[str],
    tokenizer: Tokenizer,
    template: str | None = None,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[Request]:
    """Write texts as users' questions.

    template: its name or file; None is the tokenizer's own chat template. system: the system prompt; None is the
    template's, "" none. tools: JSON schemas of tools that the template lists. variables: additional ones of it.
    """
    if template is None and tokenizer.chat_template is None and family_chat(tokenizer) is None:
        raise UserError("the tokenizer has no chat template; give --template plain, or another one.")
    rows = [SourceRow({"prompt": text}, f"--prompt {text!r:.40}") for text in texts]
    asked = [TaskRow(text, "", "") for text in texts]
    written = prompt_ids(asked, [row.where for row in rows], "", template, system, tokenizer, tools, variables)
    return _numbered(rows, written, [row.values for row in rows])


def given_prompts(
    prompts: Sequence[Any], tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """Encode texts or messages of the calling program; variables: of the chat template."""
    places = [(prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    written = write_prompts(places, tokenizer, variables=variables)
    return [Prompt(number, np.array(ids, np.int32)) for number, ids in enumerate(written)]


def _numbered(
    rows: Sequence[SourceRow], prompts: Sequence[list[int]], fields: Sequence[Mapping[str, str]]
) -> list[Request]:
    return [
        (Prompt(number, np.array(ids, np.int32), own), json_ready(row.values))
        for number, (row, ids, own) in enumerate(zip(rows, prompts, fields, strict=True))
    ]
