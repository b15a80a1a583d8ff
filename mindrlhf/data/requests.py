"""What `mindrlhf generate` is asked: prompts from a JSONL, JSON or parquet file, or from a prompt MindRecord."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.chat import render_messages
from mindrlhf.data.mindrecord import read_prompts
from mindrlhf.data.source import SourceRow, read_source
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.types import Prompt


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and the row that it came from: what the row says comes back beside the responses."""

    prompt: Prompt
    row: Mapping[str, Any]


def read_requests(path: str | Path, tokenizer: Tokenizer, limit: int | None = None) -> list[Request]:
    """The prompts of a file in order, at most `limit`.

    A row has `prompt`, which is text taken as it is or a list of messages, or `messages`; its number keys the random
    numbers, as the row index does that a MindRecord's rows have. A MindRecord ends in .mindrecord or has its .db beside
    it. Raises UserError for a file that cannot be read, and, with its line, for a row without a prompt.
    """
    path = Path(path)
    if path.suffix == ".mindrecord" or path.with_name(path.name + ".db").is_file():
        return [
            Request(prompt, {"prompt": tokenizer.decode(prompt.token_ids), **prompt.fields})
            for prompt in read_prompts(path, tokenizer)[:limit]
        ]
    rows = read_source(path)[:limit]
    encoded = tokenizer.encode_batch([_text(row, tokenizer) for row in rows])
    requests = []
    for number, (row, ids) in enumerate(zip(rows, encoded, strict=True)):
        if not ids:
            raise UserError(f"{row.where}: the prompt is empty; give it a text.")
        requests.append(Request(Prompt(number, np.array(ids, np.int32)), row.values))
    return requests


def _text(row: SourceRow, tokenizer: Tokenizer) -> str:
    given = [key for key in ("prompt", "messages") if row.values.get(key) is not None]
    if len(given) != 1:
        found = "both" if given else f"only {', '.join(row.values)}" if row.values else "nothing"
        raise UserError(f"{row.where}: should have either prompt or messages, and has {found}.")
    value = row.values[given[0]]
    if given == ["prompt"] and isinstance(value, str):
        return value
    if tokenizer.chat_template is None and tokenizer.token_to_id("<|im_start|>") is None:
        raise UserError(
            f"{row.where}: the tokenizer has no chat template and no <|im_start|> to write messages with; "
            "give the prompt as text."
        )
    eos = tokenizer.id_to_token(tokenizer.eos_token_id)
    return render_messages(value, row.where, tokenizer.chat_template, eos_token=eos)
