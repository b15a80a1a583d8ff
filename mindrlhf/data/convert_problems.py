"""Conversion of source files to MindRecord: parse, render, tokenise, cut, write."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mindrlhf.data.mindrecord import PROMPT_SCHEMA, write_columns
from mindrlhf.data.parquet import write_rows
from mindrlhf.data.prompt_text import prompt_texts
from mindrlhf.data.source import SourceRow, read_source
from mindrlhf.data.tasks import chosen_task
from mindrlhf.data.tasks.task import Task, TaskRow
from mindrlhf.data.tasks.verl import record
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.shapes import round_up

TRUNCATIONS = ("error", "left", "right", "drop")
ROWS_PER_BATCH = 512  # texts tokenised between two moves of the progress bar
SEQ_LENGTH_MULTIPLE = 64
PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True)
class ConversionSummary:
    """Counts and lengths of a conversion's rows.

    rows: written; dropped: left out for their length; truncated: written with a shortened prompt or answer.
    without_truth: written without a ground truth.
    prompt_tokens, answer_tokens: percentile (50, 90, 99, 100) -> tokens of the written rows, the answer with its end
    token, rows without an answer left out.
    """

    output: Path
    rows: int
    dropped: int
    truncated: int
    without_truth: int
    max_prompt_length: int
    seq_length: int
    prompt_tokens: dict[int, int]
    answer_tokens: dict[int, int]

    def __str__(self) -> str:
        lines = [
            f"{self.output}: {self.rows} rows, {self.dropped} dropped, {self.truncated} truncated; "
            f"max_prompt_length {self.max_prompt_length}, seq_length {self.seq_length}",
            "tokens   " + "".join(f"{'max' if p == 100 else f'p{p}':>7}" for p in PERCENTILES),
        ]
        for name, tokens in (("prompt", self.prompt_tokens), ("answer", self.answer_tokens)):
            lines.append(f"{name:<9}" + "".join(f"{tokens.get(p, '-'):>7}" for p in PERCENTILES))
        if self.without_truth:
            lines.append(f"{self.without_truth} rows have no ground truth: only for rewards that need none")
        return "\n".join(lines)


@dataclass(frozen=True)
class _TokenRow:
    """Tokenised row before writing; answer_ids include the end token, or are empty."""

    index: int
    row: TaskRow
    prompt_ids: list[int]
    answer_ids: list[int]

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.answer_ids)


def convert(
    source: str | Path | Sequence[str | Path],
    output: str | Path,
    tokenizer: Tokenizer,
    *,
    task: str | None = None,
    template: str | None = None,
    system_prompt: str | None = None,
    max_prompt_length: int = 512,
    seq_length: int | None = None,
    truncation: str = "error",
    pad_token_id: int | None = None,
    progress: bool = True,
    fields: Sequence[str] = (),
) -> ConversionSummary:
    """Convert JSONL files, JSON arrays or parquet files to a MindRecord.

    source: one file, or several whose rows follow one another. output: the MindRecord; columns in `data.mindrecord`.

    task: its name; None chooses it by the first row (`tasks.chosen_task`).
    max_prompt_length: tokens a prompt may have. seq_length: tokens of prompt + answer + end token; None takes the
    longest row's, rounded up to a multiple of 64.
    truncation: treatment of a longer prompt: `error` refuses the file, naming the row; `drop` leaves the row out;
    `left` cuts the prompt's beginning, `right` its end (and with it the template's last words, as in MindRLHF).
    Where prompt and answer exceed `seq_length`, `left` and `right` both cut the answer's end, its end token included.
    system_prompt: None is that of the row, where it has one, else the template's default; "" is none.
    pad_token_id: None is the tokenizer's.
    fields: `key=theirs` each, for rows with other keys than the task's (`tasks.fields.mapped`).

    Raises UserError for any fault of the input or the output folder; an earlier output stays as it was.
    """
    _validate(max_prompt_length, seq_length, truncation)
    pad = tokenizer.pad_token_id if pad_token_id is None else pad_token_id
    source_rows = _read(source)
    chosen = chosen_task(task, fields, source_rows[0].values)
    task_rows = [_parse(chosen, row) for row in source_rows]
    places = [row.where for row in source_rows]
    texts = prompt_texts(task_rows, places, chosen.instruction, template, system_prompt, tokenizer)
    with _progress(progress) as bars:
        tokenised = _tokenise(task_rows, texts, tokenizer)
        tokenised = list(bars.track(tokenised, total=len(task_rows), description="tokenising"))
        kept, truncated = _fit(tokenised, source_rows, max_prompt_length, seq_length, truncation)
        if not kept:
            raise UserError(
                f"{', '.join(map(str, _paths(source)))}: every row is too long, so none is left; "
                "raise --max_prompt_length or --seq_length."
            )
        width = seq_length or round_up(max(row.length for row in kept), SEQ_LENGTH_MULTIPLE)
        records = (
            _record(row, chosen.name, max_prompt_length, width, pad) for row in bars.track(kept, description="writing")
        )
        write_columns(output, PROMPT_SCHEMA, records)
    return _summary(output, kept, len(tokenised) - len(kept), truncated, max_prompt_length, width)


def _summary(
    output: str | Path, kept: Sequence[_TokenRow], dropped: int, truncated: int, max_prompt_length: int, width: int
) -> ConversionSummary:
    """Count the rows that a conversion kept."""
    return ConversionSummary(
        output=Path(output),
        rows=len(kept),
        dropped=dropped,
        truncated=truncated,
        without_truth=sum(not row.row.ground_truth for row in kept),
        max_prompt_length=max_prompt_length,
        seq_length=width,
        prompt_tokens=_percentiles([len(row.prompt_ids) for row in kept]),
        answer_tokens=_percentiles([len(row.answer_ids) for row in kept if row.answer_ids]),
    )


def convert_to_verl(
    source: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    task: str | None = None,
    fields: Sequence[str] = (),
    split: str = "train",
) -> int:
    """Write problems as a parquet file in verl's columns.

    Returns the number of rows. Source and errors as `convert`.
    """
    source_rows = _read(source)
    chosen = chosen_task(task, fields, source_rows[0].values)
    rows = [_parse(chosen, row) for row in source_rows]
    write_rows(output, [record(index, row, chosen, split) for index, row in enumerate(rows)])
    return len(rows)


def _validate(max_prompt_length: int, seq_length: int | None, truncation: str) -> None:
    if truncation not in TRUNCATIONS:
        raise UserError(f"--truncation {truncation}: unknown; give one of {', '.join(TRUNCATIONS)}.")
    if max_prompt_length < 1:
        raise UserError(f"--max_prompt_length {max_prompt_length}: should be 1 or more.")
    if seq_length is not None and seq_length <= max_prompt_length:
        raise UserError(
            f"--seq_length {seq_length}: holds the prompt and its answer, so it should be more than "
            f"--max_prompt_length {max_prompt_length}."
        )


def _read(source: str | Path | Sequence[str | Path]) -> list[SourceRow]:
    """Read the rows of one file, or of several in the order given."""
    return [row for path in _paths(source) for row in read_source(path)]


def _paths(source: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [source] if isinstance(source, str | Path) else source


def _parse(task: Task, row: SourceRow) -> TaskRow:
    try:
        return task.parse(row.values)
    except ValueError as error:
        raise UserError(f"{row.where}: not a {task.name} row: {error}.") from None


def _tokenise(rows: Sequence[TaskRow], texts: Sequence[str], tokenizer: Tokenizer) -> Iterator[_TokenRow]:
    for start in range(0, len(rows), ROWS_PER_BATCH):
        batch = rows[start : start + ROWS_PER_BATCH]
        prompts = tokenizer.encode_batch(texts[start : start + ROWS_PER_BATCH])
        answers = tokenizer.encode_batch([row.answer for row in batch])
        for offset, (row, prompt_ids, answer_ids) in enumerate(zip(batch, prompts, answers, strict=True)):
            end = [tokenizer.eos_token_id] if row.answer else []
            yield _TokenRow(start + offset, row, prompt_ids, answer_ids + end)


def _fit(
    rows: Sequence[_TokenRow],
    source_rows: Sequence[SourceRow],
    max_prompt_length: int,
    seq_length: int | None,
    truncation: str,
) -> tuple[list[_TokenRow], int]:
    """Apply the length limits; returns (rows that fit, number of shortened rows)."""
    kept, truncated = [], 0
    for row in rows:
        prompt_ids, answer_ids = row.prompt_ids, row.answer_ids
        if not prompt_ids:
            raise UserError(f"{source_rows[row.index].where}: the template renders an empty prompt; mend the template.")
        long_prompt = len(prompt_ids) > max_prompt_length
        long_row = seq_length is not None and len(prompt_ids) + len(answer_ids) > seq_length
        if not long_prompt and not long_row:
            kept.append(row)
            continue
        if truncation == "error":
            what, tokens, flag, limit = (
                ("prompt", len(prompt_ids), "--max_prompt_length", max_prompt_length)
                if long_prompt
                else ("prompt with its answer", len(prompt_ids) + len(answer_ids), "--seq_length", seq_length)
            )
            raise UserError(
                f"{source_rows[row.index].where}: the {what} has {tokens} tokens, more than {flag} {limit}; "
                "raise it, or choose --truncation left, right or drop."
            )
        if truncation == "drop":
            continue
        prompt_ids = prompt_ids[-max_prompt_length:] if truncation == "left" else prompt_ids[:max_prompt_length]
        if seq_length is not None:
            answer_ids = answer_ids[: seq_length - len(prompt_ids)]
        kept.append(_TokenRow(row.index, row.row, prompt_ids, answer_ids))
        truncated += 1
    return kept, truncated


def _record(row: _TokenRow, task: str, max_prompt_length: int, seq_length: int, pad: int) -> dict[str, Any]:
    """Make the MindRecord row: padded arrays and text columns."""
    prompt_length, end = len(row.prompt_ids), row.length
    prompt_ids = np.full(max_prompt_length, pad, np.int64)
    prompt_ids[:prompt_length] = row.prompt_ids
    pretrain_ids = np.full(seq_length, pad, np.int64)
    pretrain_ids[:end] = row.prompt_ids + row.answer_ids
    loss_mask = np.zeros(seq_length, np.int64)
    loss_mask[prompt_length:end] = 1
    return {
        "row_index": row.index,
        "prompt_ids": prompt_ids,
        "pretrain_ids": pretrain_ids,
        "loss_mask": loss_mask,
        "prompt_length": prompt_length,
        "task": task,
        "question": row.row.question,
        "ground_truth": row.row.ground_truth,
        "extra": json.dumps(dict(row.row.extra), ensure_ascii=False),
    }


def _percentiles(lengths: Sequence[int]) -> dict[int, int]:
    """Compute the length that each percentage of the rows does not exceed."""
    if not lengths:
        return {}
    return {p: int(np.percentile(lengths, p, method="inverted_cdf")) for p in PERCENTILES}


def _progress(shown: bool) -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal))
