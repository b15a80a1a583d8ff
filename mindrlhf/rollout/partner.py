"""Partners of conversations: environments, tools or users that answer the policy's turns.

A conversation is one response: turns that the policy draws, and context between them. There are no texts here: a
partner takes the drawn token ids, and returns the ids to append.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mindrlhf.types import Prompt, Rollout, TokenValues

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

EnvironmentRewards = Sequence[float | None]
"""Reward of each row's environment; None if it gives none, NaN if it failed to give it; empty without environments."""
Listener = Callable[[int, Sequence[int]], bool]
"""Called after each token with a row and the drawn ids of its turn; returns True to end the turn there."""


@dataclass(frozen=True, eq=False)
class Reply:
    """Answer to one turn of a conversation.

    row: the conversation. token_ids: int32[n], n >= 0, appended to the response as context. over: no further turn is
    drawn; token_ids are still appended. pictures: what image tokens among them show, in their order; behind the last
    one there is another token.
    """

    row: int
    token_ids: np.ndarray
    over: bool = False
    pictures: tuple["Picture", ...] = ()


Opening = tuple[Sequence[Prompt], Sequence[Reply]]
Opened = tuple[Prompt, np.ndarray]
"""Prompt of a conversation, and int32[n] to append to it."""


@dataclass(frozen=True, eq=False)
class Begun:
    """Conversation that goes on, or has ended.

    answer: the response so far; without a token the conversation has not begun. step: as `Partner.begin` has it.
    ended: its last turn ended by itself, so that the partner was given it even if nothing was said to it.
    """

    prompt: Prompt
    answer: Rollout
    step: int
    ended: bool = False

    @property
    def begun(self) -> bool:
        """True if the response has tokens."""
        return len(self.answer.response_ids) > 0

    @property
    def turns(self) -> list[tuple[int, int]]:
        """First index and end of each turn that the partner was given."""
        edges = np.flatnonzero(np.diff(self.answer.sampled.astype(np.int8), prepend=0, append=0)).tolist()
        drawn = list(zip(edges[::2], edges[1::2], strict=True))
        unanswered = drawn and drawn[-1][1] == len(self.answer.response_ids) and not self.ended
        return drawn[:-1] if unanswered else drawn

    @property
    def opening(self) -> np.ndarray:
        """Context before the first turn, int32[n]."""
        return self.answer.response_ids[: int(np.argmax(self.answer.sampled)) if len(self.answer.sampled) else 0]

    def reply_to(self, turn: int) -> np.ndarray:
        """Context behind one of the turns, int32[n]."""
        _, begin = self.turns[turn]
        after = self.answer.sampled[begin:]
        return self.answer.response_ids[begin : begin + (int(np.argmax(after)) if after.any() else len(after))]


class Partner(Protocol):
    """Partner of the conversations of a `generate` call.

    Rows are prompt-major: row = prompt's index * G + sample's index. stop_strings: texts that end a turn, like stop
    tokens and the sampling's own stop strings. statistics: of the last call, with the arguments of
    `metrics.experience.add_conversations` as attributes. tokens: by row, values at tokens of the conversations
    that `rewards` ended last; empty without any. shows: its replies may have pictures.
    """

    stop_strings: tuple[str, ...]
    shows: bool
    statistics: Any
    tokens: Sequence[TokenValues]

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        """Begin the conversations; returns prompts and the context after them.

        The end of a prompt may move to that context. There is one reply for each row, in row order, often without a
        token; none has `over` set.
        """

    def resume(self, begun: Sequence[Begun]) -> Sequence[Opened]:
        """Go on with conversations, in the order of their rows.

        Those without a token begin. Returns for each its prompt, and what is appended before its next turn: for one
        that has begun, nothing.
        """

    def recall(self, begun: Sequence[Begun]) -> EnvironmentRewards:
        """Return the environments' rewards of conversations that have ended, as `rewards`."""

    def submit(self, row: int, turn: Sequence[int], length: int) -> None:
        """Take a turn that ended by a stop token or string; returns at once.

        turn: its drawn ids, the stop token included. length: number of the response's ids so far. A turn that the token
        limit cuts off is not submitted: its conversation has ended.
        """

    def collect(self, wait: bool) -> Sequence[Reply]:
        """Return the replies that are ready; wait: wait for at least one."""

    def rewards(self) -> EnvironmentRewards:
        """End all conversations; returns the environments' rewards, rewards of turns included."""


class SharedPartner:
    """Partner shared by ranks that generate the same rows; one rank owns it.

    partner: None on the others. share: called by all of them together, with any value; returns the owner's value.
    """

    def __init__(self, partner: Partner | None, share: Callable[[Any], Any]):
        self._partner = partner
        self._share = share
        self.stop_strings: tuple[str, ...] = share(partner and partner.stop_strings)
        self.shows: bool = share(partner and partner.shows)

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        return self._share(self._partner and self._partner.begin(prompts, num_generations, step))

    def resume(self, begun: Sequence[Begun]) -> Sequence[Opened]:
        return self._share(self._partner and self._partner.resume(begun))

    def recall(self, begun: Sequence[Begun]) -> EnvironmentRewards:
        """End all conversations; the ranks without the partner get no rewards."""
        return self._partner.recall(begun) if self._partner else ()

    def submit(self, row: int, turn: Sequence[int], length: int) -> None:
        if self._partner:
            self._partner.submit(row, turn, length)

    def collect(self, wait: bool) -> Sequence[Reply]:
        return self._share(self._partner and self._partner.collect(wait))

    def rewards(self) -> EnvironmentRewards:
        """End all conversations; the ranks without the partner get no rewards."""
        return self._partner.rewards() if self._partner else ()

    @property
    def statistics(self) -> Any:
        return self._partner and self._partner.statistics

    @property
    def tokens(self) -> Sequence[TokenValues]:
        return self._partner.tokens if self._partner else ()


def begin(partner: Partner, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
    """Begin the conversations; returns prompts, and each row's context before its first turn."""
    opened, replies = partner.begin(prompts, num_generations, step)
    rows = list(range(len(prompts) * num_generations))
    if [reply.row for reply in replies] != rows or any(reply.over for reply in replies):
        raise ValueError("a partner begins every conversation once, in order, and ends none")
    return opened, replies


def check_context(reply: Reply, vocabulary: int) -> None:
    """Raise ValueError for ids that the model does not have."""
    ids = reply.token_ids
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
        raise ValueError(f"a reply to row {reply.row} has ids outside of 0 to {vocabulary - 1}")
