"""Conversion of source files to MindRecord: parse, render, tokenise, cut, write."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindrlhf.data.mindrecord import PROMPT_SCHEMA, write_columns
from mindrlhf.data.parquet import write_parquet
from mindrlhf.data.source import SourceRow, read_source
from mindrlhf.data.tasks import parse_rows
from mindrlhf.data.tasks.task import TaskRow, prompt_fields
from mindrlhf.data.tasks.verl import record
from mindrlhf.data.templates import prompt_ids
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.data.truncation import TRUNCATIONS, TokenPair, fit
from mindrlhf.errors import UserError
from mindrlhf.files.text import aligned
from mindrlhf.metrics.progress import Progress
from mindrlhf.shapes import round_up
from mindrlhf.types import Prompt

ROWS_PER_BATCH = 512  # texts tokenised between two updates of the progress bar
SEQ_LENGTH_MULTIPLE = 64
PERCENTILES = (50, 90, 99, 100)

Sources = str | Path | Sequence[str | Path]  # one file, or several with their rows in order


@dataclass(frozen=True)
class ConversionSummary:
    """Counts and lengths of a conversion's rows.

    rows: rows written; dropped: rows left out for their length; truncated: rows written with a shortened prompt or
    answer. prompt_tokens, answer_tokens: percentile (50, 90, 99, 100) -> tokens of the written rows; answers with their
    end token, empty ones left out.
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
        table = {"tokens": {p: f"p{p}" for p in PERCENTILES} | {100: "max"}}
        table |= {"prompt": self.prompt_tokens, "answer": self.answer_tokens}
        note = f"\n{self.without_truth} rows have no ground truth: only for rewards that need none"
        return (
            f"{self.output}: {self.rows} rows, {self.dropped} dropped, {self.truncated} truncated; "
            f"max_prompt_length {self.max_prompt_length}, seq_length {self.seq_length}\n"
            + aligned((name, *(each.get(p, "-") for p in PERCENTILES)) for name, each in table.items())
            + (note if self.without_truth else "")
        )


def convert(
    source: Sources,
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
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> ConversionSummary:
    """Convert JSONL files, JSON arrays or parquet files to a MindRecord.

    task: its name; None chooses it by the first row (`parse_rows`). fields: `key=theirs` pairs, columns in place of the
    task's. system_prompt: None is the row's, else the template's default; "" is none. max_prompt_length: maximum tokens
    of a prompt. seq_length: tokens of prompt, answer and end token; None takes the longest row's, rounded up to a
    multiple of 64. pad_token_id: None is the tokenizer's. tools: JSON schemas of tools that prompts list. variables:
    more of a chat template. truncation: treatment of a longer prompt: `error` refuses the file, naming the row; `drop`
    leaves the row out; `left` cuts the prompt's beginning, `right` its end (and with it the template's last words, as
    in MindRLHF). If prompt and answer exceed `seq_length`, `left` and `right` cut the answer's end, with its end token.
    UserError for any fault of the input or the output folder; an earlier output stays as it was.
    """
    _validate(max_prompt_length, seq_length, truncation)
    sources = _read(source)
    chosen, rows = parse_rows(sources, task, fields)
    places = [each.where for each in sources]
    prompts = prompt_ids(rows, places, chosen.instruction, template, system_prompt, tokenizer, tools, variables)
    pairs = list(zip(prompts, _answers(rows, tokenizer, progress), strict=True))
    fitted = [fit(*each, max_prompt_length, seq_length, truncation) for each in zip(places, pairs, strict=True)]
    kept = {index: pair for index, pair in enumerate(fitted) if pair is not None}
    if not kept:
        found = f"{places[0]}, and all others: every row is too long, so none is left"
        raise UserError(f"{found}; raise --max_prompt_length or --seq_length.")
    width = seq_length or round_up(
        max(len(prompt) + len(answer) for prompt, answer in kept.values()), SEQ_LENGTH_MULTIPLE
    )
    sizes = (max_prompt_length, width, tokenizer.pad_token_id if pad_token_id is None else pad_token_id)
    fields = {index: prompt_fields(chosen.name, rows[index]) for index in kept}
    records = (_record(index, chosen.name, fields[index], pair, *sizes) for index, pair in kept.items())
    write_columns(output, PROMPT_SCHEMA, records)
    return ConversionSummary(
        output=Path(output),
        rows=len(kept),
        dropped=len(rows) - len(kept),
        truncated=sum(pair is not pairs[index] for index, pair in kept.items()),
        without_truth=sum("ground_truth" not in each for each in fields.values()),
        max_prompt_length=max_prompt_length,
        seq_length=width,
        prompt_tokens=_percentiles(len(prompt) for prompt, _ in kept.values()),
        answer_tokens=_percentiles(len(answer) for _, answer in kept.values() if answer),
    )


def convert_rows(
    sources: Sequence[SourceRow],
    tokenizer: Tokenizer,
    *,
    template: str | None = None,
    max_prompt_length: int | None = None,
    truncation: str = "left",
    fields: Sequence[str] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """Convert source rows to the prompts that `convert` would write.

    max_prompt_length: None keeps all. truncation: treatment of longer prompts, `error`, `drop`, `left` or `right`.
    fields: `key=theirs` pairs, columns in place of the task's. variables: additional ones of a chat template. Raises
    UserError for any fault of the rows.
    """
    chosen, rows = parse_rows(sources, None, fields)
    places = [each.where for each in sources]
    written = prompt_ids(rows, places, chosen.instruction, template, None, tokenizer, tools, variables)
    prompts = []
    for index, (row, ids, where) in enumerate(zip(rows, written, places, strict=True)):
        fitted = fit(where, (ids, []), max_prompt_length, None, truncation, "data.")
        if fitted is not None:
            prompts.append(Prompt(index, np.array(fitted[0], np.int32), prompt_fields(chosen.name, row)))
    if not prompts:
        found = f"{places[0]}, and all others: every prompt has more tokens than data.max_prompt_length"
        raise UserError(f"{found} {max_prompt_length}; raise it.")
    return prompts


def convert_pairs(
    sources: Sequence[SourceRow], tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None
) -> list[TokenPair]:
    """Convert problems to prompts with their answers; UserError for an absent one."""
    chosen, rows = parse_rows(sources, None)
    places = [each.where for each in sources]
    if lacking := next((where for where, row in zip(places, rows, strict=True) if not row.answer), None):
        raise UserError(f"{lacking}: has no answer to imitate; give one, messages, or prompt and completion.")
    prompts = prompt_ids(rows, places, chosen.instruction, None, None, tokenizer, variables=variables)
    return list(zip(prompts, _answers(rows, tokenizer, progress=False), strict=True))


def convert_to_verl(
    source: Sources, output: str | Path, *, task: str | None = None, fields: Sequence[str] = (), split: str = "train"
) -> int:
    """Write problems in verl's columns as parquet; returns their number."""
    chosen, rows = parse_rows(_read(source), task, fields)
    write_parquet(output, [record(index, row, chosen, split) for index, row in enumerate(rows)])
    return len(rows)


def _validate(prompt: int, whole: int | None, truncation: str) -> None:
    if truncation not in TRUNCATIONS:
        raise UserError(f"--truncation {truncation}: unknown; give one of {', '.join(TRUNCATIONS)}.")
    if prompt < 1:
        raise UserError(f"--max_prompt_length {prompt}: should be 1 or more.")
    if whole is not None and whole <= prompt:
        found = f"--seq_length {whole}: holds the prompt and its answer"
        raise UserError(f"{found}, so it should be more than --max_prompt_length {prompt}.")


def _read(source: Sources) -> list[SourceRow]:
    paths = [source] if isinstance(source, str | Path) else source
    return [row for path in paths for row in read_source(path)]


def _answers(rows: Sequence[TaskRow], tokenizer: Tokenizer, progress: bool) -> list[list[int]]:
    """Encode worked answers with their end token; an absent one stays empty."""
    answers: list[list[int]] = []
    with Progress(progress)("tokenise", len(rows), "rows") as advance:
        for start in range(0, len(rows), ROWS_PER_BATCH):
            batch = [tokenizer.without_end(row.answer) for row in rows[start : start + ROWS_PER_BATCH]]
            ids = tokenizer.encode_batch([tokenizer.plain_text(text, markup=True) for text in batch])
            answers += [answer and tokenizer.ended(answer) for answer in ids]
            advance(len(ids))
    return answers


def _record(
    index: int, task: str, fields: Mapping[str, str], pair: TokenPair, prompt_width: int, width: int, pad: int
) -> dict[str, Any]:
    """Make the MindRecord row: padded arrays and text columns."""
    prompt, answer = pair
    columns = {"task": task, "question": fields["question"], "ground_truth": fields.get("ground_truth", "")}
    extra = {name: text for name, text in fields.items() if columns.get(name) != text}

    def padded(ids: list[int], size: int, fill: int) -> np.ndarray:
        return np.array(ids + [fill] * (size - len(ids)), np.int64)

    return {
        "row_index": index,
        "prompt_ids": padded(prompt, prompt_width, pad),
        "pretrain_ids": padded(prompt + answer, width, pad),
        "loss_mask": padded([0] * len(prompt) + [1] * len(answer), width, 0),
        "prompt_length": len(prompt),
        **columns,
        "extra": json.dumps(extra, ensure_ascii=False),
    }


def _percentiles(lengths: Iterable[int]) -> dict[int, int]:
    """Compute the length that each percentage of the rows does not exceed."""
    lengths = list(lengths)
    return {p: int(np.percentile(lengths, p, method="inverted_cdf")) for p in PERCENTILES if lengths}
