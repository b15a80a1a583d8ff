"""`mindrlhf show`: prompts, responses and rewards of a step, side by side."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from mindrlhf.errors import UserError
from mindrlhf.files.naming import ROLLOUTS_FOLDER, step_files
from mindrlhf.files.printable import LAYOUT, printable, shortened
from mindrlhf.metrics.writers import run_folder
from mindrlhf.report.groups import RolloutGroupText, read_groups

SHOWN = 1200  # characters of one text, its beginning and its end
LEAST_WIDTH = 24  # of a column with a completion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="output folder of a run")
    add("--step", type=int, help="which step (default: the last one that has rollouts)")
    add("--prompt", type=int, metavar="ID", help="this prompt only")
    add("--prompts", type=int, default=4, help="how many prompts, from the first (default 4)")
    add("--samples", type=int, default=8, help="how many answers to each, best first (default 8)")
    add("--full", action="store_true", help=f"whole texts instead of {SHOWN} characters of each")


def run(args: argparse.Namespace) -> None:
    """Print the groups, each with its prompt above its answers."""
    if args.prompts < 1 or args.samples < 1:
        raise UserError("--prompts and --samples should be 1 or more.")
    for group in _groups(args):
        _show(Console(), group, args.samples, args.full)


def _groups(args: argparse.Namespace) -> Sequence[RolloutGroupText]:
    folder = run_folder(args.run) / ROLLOUTS_FOLDER
    files = step_files(folder)
    steps = list(files)
    if not steps:
        raise UserError(f"{args.run}: has no rollouts; train with trainer.save_rollouts=True to keep them.")
    step = steps[-1] if args.step is None else args.step
    if step not in steps:
        raise UserError(f"--step {step}: {folder} has no such step; it has steps {steps[0]} to {steps[-1]}.")
    groups = {group.prompt_id: group for group in read_groups(files[step], step)}
    if args.prompt is None:
        return list(groups.values())[: args.prompts]
    if args.prompt not in groups:
        some = ", ".join(map(str, list(groups)[:20]))
        raise UserError(f"--prompt {args.prompt}: is not in step {step}, which has {some}.")
    return [groups[args.prompt]]


def _show(console: Console, group: RolloutGroupText, samples: int, full: bool) -> None:
    expected = "" if group.ground_truth is None else f" · expected {group.ground_truth}"
    title = _text(f"step {group.step} · prompt {group.prompt_id}{expected}", full)
    console.print(Panel(_text(group.prompt.strip("\n"), full), title=title, title_align="left"))
    for path in group.images:
        console.print(_text(f"picture: {path}", True))
    answers = group.answers()
    rows = answers[:samples]
    beside = max(1, console.width // (LEAST_WIDTH + 3))
    for start in range(0, len(rows), beside):
        part = rows[start : start + beside]
        heads = (_heading(same[0], len(same)) for same in part)
        table = Table(*(Column(head, overflow="fold", ratio=1) for head in heads), expand=True)
        table.add_row(*(_answer(same[0], full) for same in part))
        console.print(table)
    if more := len(group.samples) - sum(map(len, rows)):
        console.print(Text(f"{more} more answers: --samples {len(answers)}\n"))


def _heading(row: Mapping[str, Any], count: int) -> Text:
    """Describe equal answers: how many, their reward, and the first one's length."""
    reward = row["reward"]
    parts = [f"{count} × " * (count > 1) + ("unscored" if reward is None else f"reward {reward:.4g}")]
    functions = row.get("rewards") or {}
    if len(functions) > 1:
        parts += [f"{name} {'-' if value is None else format(value, '.4g')}" for name, value in functions.items()]
    if "response_length" in row:
        parts.append(f"{row['response_length']} tokens" + (", cut off" if row.get("finish_reason") == "length" else ""))
    return Text(printable("\n".join(parts), keep="\n"))


def _answer(row: Mapping[str, Any], full: bool) -> Text:
    """Write an answer; text of a conversation that is not the policy's is dim.

    Files of pictures stand behind it.
    """
    turns = row.get("turns") or [(True, row["completion"])]
    shown = row.get("turn_images") or [[]] * len(turns)
    room = SHOWN // len(turns)
    parts = []
    for (drawn, text), files in zip(turns, shown, strict=True):
        parts.append(_text(text, full, "" if drawn else "dim italic", room))
        parts += [_text(f"\npicture: {path}\n", True, "dim") for path in files]
    return Text.assemble(*parts)


def _text(text: str, full: bool, style: str = "", room: int = SHOWN) -> Text:
    """Shorten a text and escape its control characters."""
    return Text(printable(text if full else shortened(text, room), keep=LAYOUT), style)
