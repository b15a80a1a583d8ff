"""Texts to search for drafts of a response's next tokens.

Answers to one prompt repeat each other: the tokens that followed the last tokens in another answer, or earlier in this
one, are a draft. The decode operator checks it in columns of its products that would be empty (n-gram speculation; A.
Saxena, "Prompt lookup decoding", 2023). Random numbers depend only on counters, so drafts do not change tokens.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mindrlhf.types import RolloutGroup

SIZE = 4096  # tokens of texts for each slot
FEW_SLOTS = 32  # drafts are made while fewer slots are active: with more, no columns are empty
KEPT_TOKENS = 1 << 22  # of earlier answers, in total
APART = np.array([-1], np.int32)


class Histories:
    """Texts of each slot, and answers of earlier calls."""

    def __init__(self, slots: int, enabled: bool):
        self._nothing = np.full((slots, SIZE if enabled else 1), -1, np.int32)
        self._enabled = enabled
        self._earlier = {}
        self._tokens = 0

    def wanted(self, active: int) -> bool:
        """Test if a call with this many active slots makes drafts."""
        return self._enabled and active < FEW_SLOTS

    def arrays(self, texts: Collection[tuple[int, int, Sequence[np.ndarray]]] = ()) -> np.ndarray:
        """Lay out texts as int32[slots, size].

        texts: (slot, its prompt's id, its texts with its own text last); only the end that fits is used.
        """
        if not texts:
            return self._nothing
        out = self._nothing.copy()
        for slot, prompt_id, own in texts:
            parts = [part for text in (*self._earlier.get(prompt_id, ()), *own) if len(text) for part in (APART, text)]
            line = np.concatenate(parts)[-out.shape[1] :]
            out[slot, -len(line) :] = line
        return out

    def remember(self, groups: Iterable[RolloutGroup]) -> None:
        """Keep the last answers to each prompt, up to KEPT_TOKENS tokens."""
        if not self._enabled:
            return
        for group in groups:
            self._tokens -= _count(self._earlier.pop(group.prompt.id, ()))
            self._earlier[group.prompt.id] = [rollout.response_ids for rollout in group.rollouts]
            self._tokens += _count(self._earlier[group.prompt.id])
        while self._tokens > KEPT_TOKENS:
            self._tokens -= _count(self._earlier.pop(next(iter(self._earlier))))


def _count(texts: Iterable[np.ndarray]) -> int:
    return sum(map(len, texts))
