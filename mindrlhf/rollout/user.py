"""User at a terminal or a pipe as the partner of a conversation."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

import numpy as np

from mindrlhf.data.turns import Message, TurnTemplate
from mindrlhf.files.printable import LAYOUT, printable
from mindrlhf.rollout.generator import Generator
from mindrlhf.rollout.partner import EnvironmentRewards, Opening, Reply
from mindrlhf.types import Prompt

OVER = Reply(0, np.zeros(0, np.int32), over=True)
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character


class Terminal(Protocol):
    """Place where a user reads and writes.

    closed: True when there will be no further message. interrupted: True when the answer has to end now.
    """

    closed: bool

    @property
    def interrupted(self) -> bool: ...

    def ask(self) -> str | None:
        """Return the next message; None ends the conversation."""

    def write(self, text: str) -> None:
        """Show a part of an answer."""

    def note(self, text: str) -> None:
        """Show a message about the conversation."""


class User:
    """Partner who reads an answer while it is drawn, and writes the next message.

    first: first ids of the conversation. room: token limit of the conversation. decode: ids -> text without control
    tokens. most: token limit of an answer. unanswered: a message that no longer fit into the conversation.
    """

    stop_strings: tuple[str, ...] = ()
    tokens = ()
    statistics = None

    def __init__(
        self,
        terminal: Terminal,
        template: TurnTemplate,
        first: np.ndarray,
        room: int,
        decode: Callable[[Sequence[int]], str],
        most: int,
    ):
        self._terminal = terminal
        self._template = template
        self._first = first
        self._room = room
        self._decode = decode
        self._most = most
        self._turn: Sequence[int] = ()
        self._shown = self._length = 0
        self.unanswered: str | None = None

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        """Begin with the first message."""
        return prompts, [Reply(0, self._first)]

    def read(self, row: int, turn: Sequence[int]) -> bool:
        """Show the text so far; returns True to end the answer here."""
        self._turn = turn
        self._show(self._text().rstrip(INCOMPLETE))
        return self._terminal.interrupted or len(turn) >= self._most

    def submit(self, row: int, turn: Sequence[int], length: int) -> None:
        """Take the end of an answer."""
        self._length = length
        self.end_line()

    def collect(self, wait: bool) -> list[Reply]:
        """Ask for the next message."""
        text = self._terminal.ask()
        if text is None:
            return [OVER]
        message = {"role": "user", "content": self._template.reader.text(text)}
        ids = self._template.answers([message], self._turn)
        if self._length + len(ids) >= self._room:
            self.unanswered = text
            return [OVER]
        self._turn = ()
        self._shown = 0
        return [Reply(0, ids)]

    def rewards(self) -> EnvironmentRewards:
        """Return None: a user gives no reward."""
        return (None,)

    def end_line(self) -> None:
        """Show the rest of an answer, and end the line."""
        self._show(self._text())
        self._terminal.write("\n")

    def _text(self) -> str:
        return printable(self._decode(self._turn), keep=LAYOUT)

    def _show(self, text: str) -> None:
        self._terminal.write(text[self._shown :])
        self._shown = max(self._shown, len(text))


def converse(
    terminal: Terminal,
    generator: Generator,
    template: TurnTemplate,
    opening: Sequence[Message],
    most: int,
) -> None:
    """Answer messages until the terminal is closed, in one conversation after another.

    generator: its limit of new tokens applies to a conversation with its first message, so that one engine fits all
    conversations. opening: messages before the first, such as the system prompt. most: token limit of an answer.
    """
    room = generator.sampling.max_new_tokens
    unanswered = None
    for number in count():
        text = unanswered or terminal.ask()
        if terminal.closed:
            return
        if text is None:
            continue
        ids = template.prompt([*opening, {"role": "user", "content": text}])
        prompt = ids[:1]
        first = ids[1:]
        if len(first) >= room:
            unanswered = None
            terminal.note(f"the message is too long: a conversation has room for {room:,} tokens")
            continue
        user = User(terminal, template, first, room, generator.decode, most)
        (group,) = generator.generate([Prompt(0, prompt)], 1, number, partner=user, listen=user.read)
        unanswered = user.unanswered
        full = group.rollouts[0].finish_reason == "length"
        if full:
            user.end_line()
        if unanswered or full:
            terminal.note(f"the conversation had room for {room:,} tokens; a new one begins")
