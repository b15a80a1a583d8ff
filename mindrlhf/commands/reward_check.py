"""`mindrlhf reward-check`: reward functions on rows of a dataset, before training.

Prompts are the bare questions unless a MindRecord and its tokenizer are given: no template is applied.
"""

import argparse
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mindrlhf.checkpoint.local import local_model
from mindrlhf.configs.grpo import RewardFunctionSettings, RewardSettings
from mindrlhf.configs.layers import merge
from mindrlhf.configs.problems import build
from mindrlhf.configs.yaml_file import Layer
from mindrlhf.data.mindrecord import read_pairs, read_prompts
from mindrlhf.data.source import is_source, read_source
from mindrlhf.data.tasks import TASKS, parse_rows
from mindrlhf.data.tasks.task import prompt_fields
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.printable import LAYOUT, printable
from mindrlhf.rewards.batches import Sample
from mindrlhf.rewards.registry import SHIPPED
from mindrlhf.rewards.runner import RewardRunner
from mindrlhf.rewards.table import RewardTable

SHOWN_END = 48  # characters of a completion's end in the table: answers stand there
SHOWN_WHOLE = 24  # characters of a function's name that a narrow table does not break
SHOWN_COMPONENTS = 20
SHOWN_INPUT = 2000  # characters of each text of a failing input
END_TOKENS = re.compile(r"(?:<\|\w+\|>)+$")  # rollout dumps keep them, reward functions never get them


@dataclass(frozen=True)
class _Row:
    """Dataset row: id, prompt text, worked answer or "", and task fields."""

    id: int
    prompt: str
    reference: str
    fields: Mapping[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    named = (
        f"{', '.join(SHIPPED)}, package.module:function or path/file.py:function; with arguments in quotes; repeatable"
    )
    add("--reward", action="append", required=True, metavar="NAME [KEY=VALUE ...]", help=named)
    add("--data", required=True, help="prompt MindRecord, JSONL file, JSON array, parquet file, or a hub's dataset")
    add("--dataset_type", help=f"task of JSON rows: {', '.join(TASKS)} (default: by the first row, else gsm8k)")
    add("--rows", type=int, default=16, help="how many to try, from the first (default 16)")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--completion", help="one text for every row (default: the rows' reference answers)")
    texts = 'JSONL with {"completion": ...} for each row in order, or a run\'s rollout dump, with rows by prompt_id'
    given.add_argument("--completions", help=texts)
    tokenizer = "HF folder, tokenizer.json or tokenizer.model: reads a MindRecord's texts, counts response_length"
    add("--tokenizer_path", help=tokenizer)
    add("--max_new_tokens", type=int, help="what functions find in the field of this name")
    add("--timeout", type=float, default=10.0, help="seconds one call may take (default 10)")


def run(args: argparse.Namespace) -> int:
    """Score and print every call; returns 1 when a function failed on every row."""
    if args.rows < 1 or args.timeout <= 0:
        raise UserError(f"--rows {args.rows} --timeout {args.timeout:g}: both should be above 0.")
    functions = tuple(_function(text) for text in args.reward)
    named = args.tokenizer_path and local_model(args.tokenizer_path, weights=False)
    tokenizer = Tokenizer.from_path(named) if named else None
    if is_source(args.data):
        rows = _read_json(args.data, args.dataset_type, None if args.completion is None else args.rows)
    else:
        rows = _read_mindrecord(args.data, tokenizer, references=args.completion is None and args.completions is None)
    ids, samples = _samples(args, rows, tokenizer)
    with RewardRunner(RewardSettings(functions=functions, timeout_s=args.timeout)) as runner:
        table = runner.score(samples)
    _show(Console(), runner.names, ids, samples, table)
    return int(any(len(errors) == len(samples) for errors in table.errors.values()))


def _function(text: str) -> RewardFunctionSettings:
    """Read `NAME KEY=VALUE ...` as the settings of a run are read."""
    try:
        name, *pairs = shlex.split(text)
    except ValueError:  # an open quote, or nothing
        name = ""
        pairs = [""]
    if not all("=" in pair for pair in pairs):
        raise UserError(f"--reward {text!r}: give a name, then arguments as KEY=VALUE.")
    given = merge([Layer({"name": name, "args": {}}, {(): f"--reward {text!r}"})], [f"args.{pair}" for pair in pairs])
    return build(RewardFunctionSettings, given.values, given)


def _read_mindrecord(data: str, tokenizer: Tokenizer | None, references: bool) -> list[_Row]:
    prompts = read_prompts(data, tokenizer)
    if tokenizer is None:
        return [_Row(prompt.id, prompt.fields["question"], "", prompt.fields) for prompt in prompts]
    pairs = read_pairs(data, tokenizer) if references else []  # rows without an answer are left out
    answers = {prompt_ids.tobytes(): answer_ids for prompt_ids, answer_ids in pairs}
    rows = []
    for prompt in prompts:
        answer = tokenizer.decode(answers.get(prompt.token_ids.tobytes(), ()), skip_special_tokens=True)
        rows.append(_Row(prompt.id, tokenizer.decode(prompt.token_ids), answer, prompt.fields))
    return rows


def _read_json(data: str, task_name: str | None, limit: int | None) -> list[_Row]:
    task, parsed = parse_rows(read_source(data, limit), task_name)
    return [
        _Row(number, row.question if row.prompt is None else row.prompt, row.answer, prompt_fields(task.name, row))
        for number, row in enumerate(parsed)
    ]


def _samples(
    args: argparse.Namespace, rows: Sequence[_Row], tokenizer: Tokenizer | None
) -> tuple[list[int], list[Sample]]:
    """Collect (row id of each sample, the samples)."""
    if args.completions:
        answered = _read_completions(args.completions, rows)
    elif args.completion is not None:
        answered = [(row, args.completion) for row in rows]
    else:
        answered = [(row, row.reference) for row in rows[: args.rows] if row.reference]
    if not answered:
        more = "" if tokenizer else ", or --tokenizer_path when it is a MindRecord"
        raise UserError(f"{args.data}: no row has a reference answer to try; give --completion or --completions{more}.")
    ids = []
    samples = []
    for row, completion in answered[: args.rows]:
        prompt_ids = tokenizer.encode(row.prompt) if tokenizer else None
        completion_ids = tokenizer.encode(completion) if tokenizer else None
        counted = {"response_length": str(len(completion_ids))} if tokenizer else {}
        limit = {} if args.max_new_tokens is None else {"max_new_tokens": str(args.max_new_tokens)}
        ids.append(row.id)
        fields = {**row.fields, **counted, **limit}
        samples.append(Sample(row.prompt, completion, fields, prompt_ids, completion_ids))
    return ids, samples


def _read_completions(path: str, rows: Sequence[_Row]) -> list[tuple[_Row, str]]:
    by_id = {row.id: row for row in rows}
    answered = []
    for index, source in enumerate(read_source(path)):
        completion = source.values.get("completion")
        if not isinstance(completion, str):
            raise UserError(f"{source.where}: key 'completion' should be text, and is {completion!r:.80}.")
        place = source.values.get("prompt_id", rows[index].id if index < len(rows) else None)
        if place not in by_id:
            raise UserError(f"{source.where}: there is no dataset row for it; --data has {len(rows)} rows.")
        answered.append((by_id[place], END_TOKENS.sub("", completion)))
    return answered


def _show(
    console: Console, names: Sequence[str], ids: Sequence[int], samples: Sequence[Sample], table: RewardTable
) -> None:
    calls = _table(names, "row", "completion", "function", "score", "components", "ms", "error")
    for index, sample in enumerate(samples):
        for place, name in enumerate(names):
            calls.add_row(
                *((str(ids[index]), Text(printable(_end(sample.completion)))) if place == 0 else ("", "")),
                Text(name),
                _number(table.by_function[name][index]),
                Text(_details(table, name, index)),
                f"{1000 * table.seconds[name][index]:.2f}",
                Text(table.errors[name].get(index, ""), style="red"),
                end_section=place == len(names) - 1 > 0,
            )
    console.print(calls)
    summary = _table(names, "function", "mean", "min", "max", "scored", "abstained", "failed", "timed out", "ms")
    for name in names:
        scores = table.by_function[name][~np.isnan(table.by_function[name])]
        spread = [_number(reduce(scores)) if scores.size else "-" for reduce in (np.mean, np.min, np.max)]
        abstained = len(samples) - scores.size - len(table.errors[name])
        counts = [scores.size, abstained, table.failures[name], table.timeouts[name]]
        summary.add_row(Text(name), *spread, *map(str, counts), f"{1000 * table.seconds[name].mean():.2f}")
    console.print(summary)
    for failure in table.first_failures:
        reason = f"{failure.function} failed on row {ids[failure.sample]}: {failure.reason}"
        console.print(Text(reason, style="bold red"))
        given = {"prompt": failure.prompt, "completion": failure.completion, **failure.fields}
        for key, text in given.items():
            console.print(Text.assemble((f"  {printable(key)}: ", "bold"), printable(text[:SHOWN_INPUT], keep=LAYOUT)))


def _table(names: Sequence[str], *headers: str) -> Table:
    """Make a table for 80 columns.

    The functions' names are not broken unless they are long.
    """
    whole = max(map(len, names)) <= SHOWN_WHOLE
    columns = (Column(header, overflow="fold", no_wrap=whole and header == "function") for header in headers)
    return Table(*columns, padding=(0, 1, 0, 0))


def _details(table: RewardTable, function: str, index: int) -> str:
    """List a call's further numbers and texts."""
    numbers = {key: values[index] for key, values in table.components[function].items()}
    given = [f"{key} {value:.4g}" for key, value in numbers.items() if not np.isnan(value)]
    given += [f"{key} {printable(_end(text))}" for key, text in table.notes[index].get(function, {}).items()]
    more = [f"... {len(given) - SHOWN_COMPONENTS} more"] if len(given) > SHOWN_COMPONENTS else []
    return "\n".join(given[:SHOWN_COMPONENTS] + more)


def _end(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_END else "…" + text[-SHOWN_END:]


def _number(value: float) -> str:
    return "-" if np.isnan(value) else f"{value:.4g}"
