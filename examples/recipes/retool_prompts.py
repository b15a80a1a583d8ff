"""Write problems for the recipe retool.yaml with the instruction of its demonstrations.

python retool_prompts.py DEMONSTRATIONS PROBLEMS OUTPUT.parquet

The demonstrations have `messages`, the problems verl's columns; each is a file or a dataset's id on a hub. The
instruction of a file is the lines that all its prompts begin and end with. A repeated problem is written once.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

from mindrlhf.data.parquet import write_parquet
from mindrlhf.data.source import read_source
from mindrlhf.errors import UserError

Lines = list[str]


def instruction(prompts: Iterable[str]) -> tuple[Lines, Lines]:
    """Find the lines that all prompts begin with, and those that they end with."""
    lines = [prompt.split("\n") for prompt in prompts]
    before = _shared(lines)
    after = _shared([each[len(before) :][::-1] for each in lines])
    return before, after[::-1]


def write_problems(demonstrations: str, problems: str, output: str) -> None:
    """Write the problems with the demonstrations' instruction in place of their own."""
    before, after = instruction(_by_prompt(demonstrations, "messages"))
    if not before:
        raise UserError(f"{demonstrations}: its prompts do not begin alike, so there is no instruction to take over.")
    asked = _by_prompt(problems, "prompt")
    start, end = map(len, instruction(asked))
    rows = []
    for prompt, row in asked.items():
        lines = prompt.split("\n")
        text = "\n".join([*before, *lines[start : len(lines) - end], *after])
        rows.append(row | {"prompt": [{"role": "user", "content": text}]})
    write_parquet(output, rows)
    print("\n".join([f"{output}: {len(rows)} problems, each between these lines:", *before, "...", *after]))


def main() -> int:
    """Write the problems, or say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("demonstrations", "problems", "output"):
        parser.add_argument(name)
    try:
        write_problems(**vars(parser.parse_args()))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _by_prompt(path: str, column: str) -> dict[str, dict[str, Any]]:
    rows = read_source(path)
    if lacking := [row.where for row in rows if not row.values.get(column)]:
        raise UserError(f"{lacking[0]}: has no {column}; demonstrations have `messages`, problems have `prompt`.")
    return {row.values[column][0]["content"]: row.values for row in rows}


def _shared(prompts: Sequence[Lines]) -> Lines:
    return [lines[0] for lines in takewhile(lambda lines: len(set(lines)) == 1, zip(*prompts, strict=False))]


if __name__ == "__main__":
    sys.exit(main())
