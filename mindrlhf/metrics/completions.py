"""Best and worst answer to one prompt of a step, on the console."""

from collections.abc import Callable, Sequence
from typing import TextIO

import numpy as np

from mindrlhf.files.printable import printable, shortened
from mindrlhf.metrics.console import console_width
from mindrlhf.types import Experience

LINES = 3  # of a text, at most


def print_best_and_worst(
    step: int, experiences: Sequence[Experience], decode: Callable[[Sequence[int]], str], stream: TextIO | None = None
) -> None:
    """Print the group whose rewards differ most: its prompt, best and worst answer.

    Long texts are cut to beginning and end. decode: token ids -> text without special tokens. stream: standard output
    by default. Prints nothing for a step without rewards.
    """
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    scored = [e for e in experiences if not np.isnan(e.rewards).all()]
    if not scored:
        return
    shown = max(scored, key=lambda e: np.nanmax(e.rewards) - np.nanmin(e.rewards))
    prompt = shown.group.prompt
    rewards = shown.rewards
    texts = {f"step {step}, prompt {prompt.id}": prompt.fields.get("question") or decode(prompt.token_ids)}
    if truth := prompt.fields.get("ground_truth"):
        texts["expected"] = truth
    for name, index in (("best", np.nanargmax(rewards)), ("worst", np.nanargmin(rewards))):
        texts[f"{name}, reward {rewards[index]:.2f}"] = decode(shown.group.rollouts[index].text_ids)
    width = console_width()
    room = LINES * max(8, width - max(map(len, texts)) - 4)
    table = Table.grid(Column(justify="right", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
    for label, text in texts.items():
        table.add_row(label, Text(shortened(printable(" ".join(text.split())), room, " ")))
    Console(file=stream, width=width, highlight=False).print(table)
