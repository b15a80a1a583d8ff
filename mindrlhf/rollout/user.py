"""User at a terminal or a pipe as the partner of a conversation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.data.pictures import TEXT_PART, token_repeats
from mindrlhf.data.turns import Message, TurnTemplate
from mindrlhf.files.printable import LAYOUT, printable
from mindrlhf.rollout.generator import Generator
from mindrlhf.rollout.partner import EnvironmentRewards, Opening, Reply
from mindrlhf.types import Prompt

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

OVER = Reply(0, np.zeros(0, np.int32), over=True)
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the first bytes of a character


@dataclass(frozen=True, eq=False)
class TypedMessage:
    """Message of a user.

    content: a text, or with pictures the parts of `data.pictures.with_images`. pictures: in the order of their parts.
    """

    content: Any
    pictures: tuple["Picture", ...] = ()


@dataclass(frozen=True, eq=False)
class Conversation:
    """Conversation up to the model's next turn.

    ids: int32[T], with all tokens of images. pictures: in the order of their tokens. prefilled: number of first ids
    that are prefilled, up to the last image and at least 1; decode steps take the others.
    """

    ids: np.ndarray
    pictures: tuple["Picture", ...]
    prefilled: int


class ConversationWriter:
    """Writer of typed messages as ids.

    template: of messages; for a model that sees, one that takes parts. opening: messages before the first. vision: of
    a model that sees.
    """

    def __init__(self, template: TurnTemplate, opening: Sequence[Message], vision: VisionConfig | None = None):
        self._template = template
        self._opening = opening
        self._vision = vision

    def first(self, typed: TypedMessage) -> Conversation:
        """Begin a conversation. ValueError for a template that does not write each image once."""
        message = {"role": "user", "content": typed.content}
        return self._conversation(self._wide(self._template.prompt([*self._opening, message]), typed), typed.pictures)

    def next(self, typed: TypedMessage, turn: Sequence[int]) -> np.ndarray:
        """Write a message behind the model's turn; raises as `first`."""
        message = {"role": "user", "content": self._plain(typed.content)}
        return self._wide(self._template.answers([message], turn), typed)

    def continued(
        self, before: Conversation, said: Sequence[int], ids: np.ndarray, typed: TypedMessage
    ) -> Conversation:
        """Append the tokens that were said, and a message, to a conversation."""
        whole = np.concatenate((before.ids, np.array(said, np.int32), ids))
        return self._conversation(whole, (*before.pictures, *typed.pictures))

    def _conversation(self, ids: np.ndarray, pictures: tuple["Picture", ...]) -> Conversation:
        # The first decode step takes the prompt's last token, which therefore is not an image's.
        prefilled = int(np.flatnonzero(ids == self._vision.image_token_id)[-1]) + 2 if self._vision and pictures else 1
        return Conversation(ids, pictures, prefilled)

    def _wide(self, ids: np.ndarray, typed: TypedMessage) -> np.ndarray:
        """Repeat the token of each picture for all of its tokens."""
        if self._vision is None:
            return ids
        counts = [picture.tokens for picture in typed.pictures]
        return np.repeat(ids, token_repeats(ids, counts, self._vision.image_token_id))

    def _plain(self, content: Any) -> Any:
        """Keep control tokens in typed texts as text."""
        read = self._template.reader.text
        if isinstance(content, str):
            return read(content)
        return [part | {"text": read(part["text"])} if part["type"] == TEXT_PART else part for part in content]


class Terminal(Protocol):
    """Place where a user reads and writes.

    closed: True when there will be no further message. interrupted: True when the answer has to end now.
    """

    closed: bool

    @property
    def interrupted(self) -> bool: ...

    def ask(self) -> TypedMessage | None:
        """Return the next message; None ends the conversation."""

    def write(self, text: str) -> None:
        """Show a part of an answer."""

    def note(self, text: str) -> None:
        """Show a message about the conversation."""


class User:
    """Partner who reads an answer while it is drawn, and writes the next message.

    conversation: ids and pictures so far. room: token limit of the conversation. decode: ids -> text without control
    tokens. most: token limit of an answer. unanswered: a message that no longer fit into the conversation. continued:
    the conversation with a message that shows pictures, which needs a prefill.
    """

    stop_strings: tuple[str, ...] = ()
    tokens = ()
    statistics = None
    shows = False  # a message with pictures ends the request

    def __init__(
        self,
        terminal: Terminal,
        writer: ConversationWriter,
        conversation: Conversation,
        room: int,
        decode: Callable[[Sequence[int]], str],
        most: int,
    ):
        self._terminal = terminal
        self._writer = writer
        self._conversation = conversation
        self._room = room
        self._decode = decode
        self._most = most
        self._turn: Sequence[int] = ()
        self._said: list[int] = []  # behind the conversation
        self._shown = 0
        self.unanswered: TypedMessage | None = None
        self.continued: Conversation | None = None

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        """Begin with the first message."""
        return prompts, [Reply(0, self._conversation.ids[self._conversation.prefilled :])]

    def read(self, row: int, turn: Sequence[int]) -> bool:
        """Show the text so far; returns True to end the answer here."""
        self._turn = turn
        self._show(self._text().rstrip(INCOMPLETE))
        return self._terminal.interrupted or len(turn) >= self._most

    def submit(self, row: int, turn: Sequence[int], length: int) -> None:
        """Take the end of an answer."""
        self.end_line()

    def collect(self, wait: bool) -> list[Reply]:
        """Ask for the next message."""
        typed = self._terminal.ask()
        if typed is None:
            return [OVER]
        try:
            ids = self._writer.next(typed, self._turn)
        except ValueError as error:
            self._terminal.note(f"{error}")
            return self.collect(wait)
        said = [*self._said, *self._turn]
        if len(self._conversation.ids) + len(said) + len(ids) >= self._room:
            self.unanswered = typed
            return [OVER]
        if typed.pictures:
            self.continued = self._writer.continued(self._conversation, said, ids, typed)
            return [OVER]
        self._said = [*said, *ids.tolist()]
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
    writer: ConversationWriter,
    most: int,
) -> None:
    """Answer messages until the terminal is closed, in one conversation after another.

    generator: its limit of new tokens applies to a conversation with its first token, so that one engine fits all
    conversations of texts. A message with pictures is prefilled with all before it, and its answer drawn by an engine
    for prompts of this length. most: token limit of an answer.
    """
    sampling = generator.sampling
    room = sampling.max_new_tokens + 1
    unanswered: TypedMessage | None = None
    conversation: Conversation | None = None
    for number in count():
        if conversation is None:
            typed = unanswered or terminal.ask()
            if terminal.closed:
                return
            unanswered = None
            conversation = typed and _begun(terminal, writer, typed, room)
        if conversation is None:
            continue
        generator.sampling = sampling.model_copy(update={"max_new_tokens": room - conversation.prefilled})
        user = User(terminal, writer, conversation, room, generator.decode, most)
        prompt = Prompt(0, conversation.ids[: conversation.prefilled], pictures=conversation.pictures)
        (group,) = generator.generate([prompt], 1, number, partner=user, listen=user.read)
        conversation = user.continued
        unanswered = user.unanswered
        full = group.rollouts[0].finish_reason == "length"
        if full:
            user.end_line()
        if unanswered or full:
            terminal.note(f"the conversation had room for {room - 1:,} tokens; a new one begins")


def _begun(terminal: Terminal, writer: ConversationWriter, typed: TypedMessage, room: int) -> Conversation | None:
    """Begin a conversation with a message.

    None, with a note, for a message that cannot be answered.
    """
    try:
        conversation = writer.first(typed)
    except ValueError as error:
        terminal.note(f"{error}")
        return None
    if len(conversation.ids) < room:
        return conversation
    terminal.note(f"the message is too long: a conversation has room for {room - 1:,} tokens")
    return None
