"""Demonstrations for supervised fine-tuning: worked answers and conversations."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.chat import report_kept
from mindrlhf.data.convert_problems import convert_pairs
from mindrlhf.data.demonstration_forms import as_messages
from mindrlhf.data.mindrecord import read_pairs
from mindrlhf.data.source import SourceRow, given_rows, is_source, read_source, refuse_images
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.tool_formats import load_tool_format
from mindrlhf.data.turns import ASSISTANT, DemonstrationTemplates, Turns
from mindrlhf.errors import UserError
from mindrlhf.files.json import parse_json

FORMS = ("messages", "completion", "text", "conversations", "instruction")
TASK_KEYS = ("factors", "nums", "numbers")

_log = logging.getLogger(__name__)


def read_demonstrations(
    path: str | Path,
    tokenizer: Tokenizer,
    tool_format: str = "hermes",
    max_length: int | None = None,
    given: Iterable[Mapping[str, Any]] | None = None,
    split: str | None = "train",
    variables: Mapping[str, Any] | None = None,
) -> list[Turns]:
    """Read the rows of a MindRecord (`read_pairs`), or conversations of another file.

    A row of a JSONL, JSON or parquet file has `messages`, which include assistant turns and may include `tool_calls`
    and tool messages, and may have `tools`: schemas that the chat template lists. Or it has `prompt` and `completion`:
    both texts (an end token is added), or both messages. Or it has `text` alone, whose every token but the first is
    trained, with an end token. Or it has another suite's form (`as_messages`), or is a problem with an answer, as
    `mindrlhf data` reads it. tool_format: its name, or `file.py:Class`. max_length: maximum tokens of prompt and
    response; a longer response loses its end. A row left without an assistant's token is left out, and a warning counts
    these rows. given: rows of the calling program instead of the file's. variables: additional ones of the chat
    template. split: of a folder or a hub's dataset. UserError, with the place, for a malformed row.
    """
    path = Path(path)
    if given is not None or is_source(path):
        templates = DemonstrationTemplates(tokenizer, load_tool_format(tool_format), variables)
        rows = read_source(path, split=split) if given is None else given_rows(given, str(path))
        problems = [row for row in rows if _is_problem(row.values)]
        pairs = iter(convert_pairs(problems, tokenizer, variables) if problems else ())
        found = [
            _answered(*next(pairs)) if _is_problem(row.values) else _demonstration(row, templates, tokenizer)
            for row in rows
        ]
        report_kept(templates.kept, rows[0].where)
    else:
        found = [_answered(prompt, answer) for prompt, answer in read_pairs(path, tokenizer)]
    trained = [turns for turns in found if turns.sampled.any()]
    if not trained:
        raise UserError(f"{path}: no row has a turn of the assistant that is trained; give one the weight 1.")
    if len(trained) < len(found):
        _log.warning(
            "%s: %d of %d rows are left out, of which nothing is trained", path, len(found) - len(trained), len(found)
        )
    if max_length is None:
        return trained
    kept = [short for turns in trained if (short := turns.cut(max_length)).sampled.any()]
    if not kept:
        raise UserError(f"{path}: no row has an answer within data.max_length {max_length}; raise it.")
    if left_out := len(trained) - len(kept):
        _log.warning(
            "%s: %d of %d rows are left out, whose prompts fill data.max_length %d",
            path,
            left_out,
            len(trained),
            max_length,
        )
    return kept


def _is_problem(row: Mapping[str, Any]) -> bool:
    """Test for a problem, which is in no form of demonstrations."""
    return not any(row.get(key) is not None for key in FORMS) and not {"question", "prompt", *TASK_KEYS}.isdisjoint(row)


def _answered(prompt: Sequence[int], answer: Sequence[int]) -> Turns:
    return Turns(np.array(prompt, np.int32), np.array(answer, np.int32), np.full(len(answer), True))


def _demonstration(row: SourceRow, templates: DemonstrationTemplates, tokenizer: Tokenizer) -> Turns:
    values = row.values
    refuse_images(values, row.where)
    try:
        values = as_messages(values)
        prompt, completion = values.get("prompt"), values.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            before = tokenizer.encode_prompt(prompt)
            answer = tokenizer.ended(tokenizer.encode(completion))
            if not before:
                raise ValueError("the prompt is empty; give it a text")
            return Turns(np.array(before, np.int32), np.array(answer, np.int32), np.full(len(answer), True))
        if {type(prompt), type(completion)} == {str, list}:
            raise ValueError("prompt and completion should both be texts, or both be messages")
        text = values.get("text")
        messages = values.get("messages")
        if isinstance(text, str) and messages is None and prompt is None:
            return _whole_text(text, tokenizer)
        if isinstance(prompt, list) and isinstance(completion, list):
            if any(isinstance(message, Mapping) and message.get("role") == ASSISTANT for message in prompt):
                raise ValueError("the prompt has an assistant's turn, which would be trained too; give messages")
            messages = [*prompt, *completion]
        if messages is None:
            raise ValueError(
                "needs messages, prompt and completion, text, or a problem with an answer, and has "
                f"{', '.join(values) or 'nothing'}"
            )
        tools = values.get("tools") or None
        tools = parse_json(tools) if isinstance(tools, str) else tools
        if not isinstance(tools, list | None):
            raise ValueError(f"tools should be a list of schemas, and is {tools!r:.80}")
        return templates.opened(bool(tools)).conversation(messages, tools)
    except (ValueError, UserError) as error:
        raise UserError(f"{row.where}: {str(error).removesuffix('.')}.") from None


def _whole_text(text: str, tokenizer: Tokenizer) -> Turns:
    """Make a text, control tokens and all, an answer to its own first token."""
    ids = tokenizer.encode_prompt(text)
    if ids in ([], tokenizer.begin_ids, [tokenizer.eos_token_id]):
        raise ValueError("the text is empty")
    first, *answer = tokenizer.ended(ids)
    return Turns(np.array([first], np.int32), np.array(answer, np.int32), np.full(len(answer), True))
