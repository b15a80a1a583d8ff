"""Requests of a session: a prompt to answer, and how."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.errors import UserError
from mindrlhf.rollout.partner import Listener, Partner, Reply
from mindrlhf.types import Prompt, Rollout


@dataclass(frozen=True, eq=False)
class Request:
    """Prompt to answer, with its own sampling.

    samples: number of responses. seed, step: key the random numbers, together with the prompt's id and the response's
    index. partner: answers the turns of the responses, which are its rows from `row` on; openings: by response,
    what it puts before the first turn. listen: called after each drawn token.
    begun: by response, ids that it already has; their keys and values are computed again, and drawing goes on behind
    them. firsts: by response, the first token of its present turn. limits: by response, tokens at which it ends, those
    included; by default `sampling.max_new_tokens`, which alone cuts a partner's reply. keys: by response, its index
    among all that are drawn for the prompt in a step; by default they are the next ones. whole: if these may be a part
    of a group, its size: prompts are then prefilled in one shape, whatever their number.
    """

    prompt: Prompt
    sampling: SamplingSettings
    samples: int = 1
    seed: int = 0
    step: int = 0
    partner: Partner | None = None
    row: int = 0
    openings: Sequence[Reply] = ()
    listen: Listener | None = None
    begun: Sequence[np.ndarray] = ()
    firsts: Sequence[int] = ()
    limits: Sequence[int] = ()
    keys: Sequence[int] = ()
    whole: int = 0

    def limit(self, sample: int) -> int:
        """Return the most tokens of a response."""
        return self.limits[sample] if self.limits else self.sampling.max_new_tokens

    def key(self, sample: int) -> int:
        """Return a response's index among a step's responses to the prompt."""
        # A prompt that a step draws again gets new samples, not the same samples again.
        return self.keys[sample] if self.keys else self.prompt.occurrence * self.samples + sample

    def known(self, sample: int) -> int:
        """Count the tokens that a response already has."""
        return len(self.begun[sample]) if self.begun else 0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a turn."""
        return (*self.sampling.stop_strings, *(self.partner.stop_strings if self.partner else ()))


class Work:
    """State of a request.

    home: the slot that holds its prompt for all its samples; -1 is none. prompt_routing: of its prompt, as soon as a
    response has ended, if it is recorded.
    """

    def __init__(self, number: int, request: Request, operator: bool):
        self.number = number
        self.request = request
        self.operator = operator
        self.rollouts: list[Rollout | None] = [None] * request.samples
        self.slots = [-1] * request.samples
        self.placed = 0
        self.home = -1
        self.prompt_routing: np.ndarray | None = None

    @property
    def answered(self) -> bool:
        """True when all responses have ended."""
        return all(rollout is not None for rollout in self.rollouts)


def check_length(prompt: Prompt, limit: int) -> None:
    """Raise UserError for a prompt of more tokens than `limit`."""
    if len(prompt.token_ids) > limit:
        raise UserError(
            f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and the limit is {limit}; "
            f"raise max_prompt_length or convert the data with --truncation left."
        )


def check_stop_strings(stop_strings: Sequence[str], decode_text: Callable | None) -> None:
    """Raise ValueError for stop strings without a function that decodes."""
    if stop_strings and decode_text is None:
        raise ValueError("stop strings need decode_text")
