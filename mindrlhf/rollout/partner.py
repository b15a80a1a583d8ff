"""Partners of conversations: environments, tools or users that answer the policy's turns.

A conversation is one response: turns that the policy draws, and context between them. There are no texts here: a
partner takes the drawn token ids, and returns the ids to append.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mindrlhf.types import Prompt, TokenValues

EnvironmentRewards = Sequence[float | None]
"""Reward of each row's environment; None if it gives none, NaN if it failed to give it; empty without environments."""
Listener = Callable[[int, Sequence[int]], bool]
"""Called after each token with a row and the drawn ids of its turn; returns True to end the turn there."""


@dataclass(frozen=True, eq=False)
class Reply:
    """Answer to one turn of a conversation.

    row: the conversation. token_ids: int32[n], n >= 0, appended to the response as context. over: no further turn is
    drawn; token_ids are still appended.
    """

    row: int
    token_ids: np.ndarray
    over: bool = False


Opening = tuple[Sequence[Prompt], Sequence[Reply]]


class Partner(Protocol):
    """Partner of the conversations of a `generate` call.

    Rows are prompt-major: row = prompt's index * G + sample's index. stop_strings: texts that end a turn, like stop
    tokens and the sampling's own stop strings. statistics: of the last call, with the arguments of
    `metrics.experience.add_conversations` as attributes. tokens: by row, values at tokens of the conversations
    that `rewards` ended last; empty without any.
    """

    stop_strings: tuple[str, ...]
    statistics: Any
    tokens: Sequence[TokenValues]

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        """Begin the conversations; returns prompts and the context after them.

        The end of a prompt may move to that context. There is one reply for each row, in row order, often without a
        token; none has `over` set.
        """

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
        self._partner, self._share = partner, share
        self.stop_strings: tuple[str, ...] = share(partner and partner.stop_strings)

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Opening:
        return self._share(self._partner and self._partner.begin(prompts, num_generations, step))

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


class Exchange:
    """Exchange of turns and replies in a `generate` call.

    partner: None if a turn is a whole response. rows, limit: number of responses, and most tokens of each.

    context: int32[rows, limit], the partner's ids at their places in a response, -1 elsewhere. first: int32[rows], the
    place of the current turn's first token. waiting: bool[rows], True while a reply is outstanding.
    """

    def __init__(self, partner: Partner | None, rows: int, limit: int, vocabulary: int):
        self.partner, self._limit, self._vocabulary = partner, limit, vocabulary
        self.context = np.full((rows, limit), -1, np.int32)
        self.first, self.waiting = np.zeros(rows, np.int32), np.zeros(rows, bool)

    def begin(self, prompts: Sequence[Prompt], num_generations: int, step: int) -> Sequence[Prompt]:
        """Put the partner's context before the first turns.

        Returns the prompts without this context. A response keeps space for one drawn token.
        """
        if self.partner is None:
            return prompts
        opened, replies = self.partner.begin(prompts, num_generations, step)
        if [reply.row for reply in replies] != list(range(len(self.waiting))) or any(reply.over for reply in replies):
            raise ValueError("a partner begins every conversation once, in order, and ends none")
        for reply in replies:
            self._append(reply, 0, self._limit - 1)
        return opened

    def submit(self, row: int, tokens: np.ndarray, length: int) -> None:
        """Submit a row's turn. tokens: int32[limit], the response; length: its tokens."""
        self.waiting[row] = True
        self.partner.submit(row, tokens[self.first[row] : length].tolist(), length)

    def collect(self, wait: bool, lengths: np.ndarray) -> list[tuple[int, int, bool]]:
        """Append the replies that are ready to responses of these lengths.

        Returns for each conversation that ends by this: its row, its final length, and True if the limit ended it.
        """
        ended = []
        for reply in self.partner.collect(wait):
            row = reply.row
            if not self.waiting[row]:
                raise ValueError(f"a reply to row {row}, which waits for none")
            self.waiting[row] = False
            length = int(lengths[row])
            cut = self._append(reply, length, self._limit) or (not reply.over and self.first[row] == self._limit)
            if reply.over or cut:
                ended.append((row, int(self.first[row]), cut))
        return ended

    def _append(self, reply: Reply, length: int, limit: int) -> bool:
        """Append a reply to a response of this length, up to the limit.

        Returns True if the limit cuts the reply off.
        """
        ids = np.asarray(reply.token_ids, np.int32)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocabulary:
            raise ValueError(f"a reply to row {reply.row} has ids outside of 0 to {self._vocabulary - 1}")
        taken = ids[: limit - length]
        self.first[reply.row] = length + len(taken)
        self.context[reply.row, length : self.first[reply.row]] = taken
        return len(taken) < len(ids)
