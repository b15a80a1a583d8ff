"""Demonstrations for supervised fine-tuning: worked answers and conversations."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.mindrecord import read_pairs
from mindrlhf.data.source import PARQUET, read_source
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import load_tool_format
from mindrlhf.data.turns import Turns, TurnTemplate
from mindrlhf.errors import UserError
from mindrlhf.files.json import parse_json

SOURCES = (".jsonl", ".json", PARQUET)


def read_demonstrations(
    path: str | Path, tokenizer: Tokenizer, tool_format: str = "hermes", max_length: int | None = None
) -> list[Turns]:
    """Read the rows of a MindRecord (`read_pairs`), or conversations of another file.

    A row of a JSONL, JSON or parquet file has `messages` with an assistant's turns, `tool_calls` and tool messages
    among them, and may have `tools`: schemas that the chat template lists. tool_format: see `load_tool_format`.
    max_length: tokens of prompt and response; a longer response loses its end, and a row without an assistant's token
    then is left out. UserError, with its place, for a malformed row.
    """
    path = Path(path)
    if path.suffix in SOURCES or path.is_dir():
        template = TurnTemplate(tokenizer, tool_format=load_tool_format(tool_format))
        table = path.suffix == PARQUET  # whose rows have a null for each key that only other rows have
        rows = [(_without_nulls(row.values) if table else row.values, row.where) for row in read_source(path)]
        found = [_conversation(*row, template) for row in rows]
    else:
        found = [Turns(prompt, answer, np.full(len(answer), True)) for prompt, answer in read_pairs(path, tokenizer)]
    if max_length is None:
        return found
    kept = [short for turns in found if (short := turns.cut(max_length)).sampled.any()]
    if not kept:
        raise UserError(f"{path}: no row has an answer within data.max_length {max_length}; raise it.")
    return kept


def _conversation(values: Mapping[str, Any], where: str, template: TurnTemplate) -> Turns:
    try:
        tools = values.get("tools") or None
        tools = parse_json(tools) if isinstance(tools, str) else tools
        if not isinstance(tools, list | None):
            raise ValueError(f"tools should be a list of schemas, and is {tools!r:.80}")
        return template.conversation(values.get("messages"), tools)
    except (ValueError, UserError) as error:
        raise UserError(f"{where}: {str(error).removesuffix('.')}.") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
