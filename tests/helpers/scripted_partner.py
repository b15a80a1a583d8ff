"""The other side of conversations, for tests: what it says depends on token ids alone, when it says it on a seed."""

import numpy as np

from mindrlhf.rollout.partner import Reply

LONGEST = 7  # tokens of an answer


def first_words(prompt_id: int, sample: int) -> list[int]:
    """What stands in front of a conversation's first turn; often nothing."""
    rng = np.random.default_rng([prompt_id, sample])
    return rng.integers(0, 64, max(0, rng.integers(-4, 5))).tolist()


def answer(turn, length: int) -> tuple[list[int], bool]:
    """(ids, whether the conversation is over) for a turn; each is sometimes empty, or the last."""
    rng = np.random.default_rng([*turn, length])
    return rng.integers(0, 64, max(0, rng.integers(-2, LONGEST + 1))).tolist(), bool(rng.random() < 0.15)


class ScriptedPartner:
    """Keeps what it hears. order: seeds the time of replies; None is at once. lazy: says nothing until waited for."""

    def __init__(self, order: int | None = None, stop_strings=(), lazy: bool = False, silent: bool = False):
        self.stop_strings, self._lazy, self._silent = tuple(stop_strings), lazy, silent
        self._order = None if order is None else np.random.default_rng(order)
        self._ready: list[Reply] = []
        self.heard: dict[int, list[tuple[list[int], int]]] = {}
        self.waited, self.statistics = 0, None

    def begin(self, prompts, num_generations, step):
        keys = [(prompt.id, sample) for prompt in prompts for sample in range(num_generations)]
        self.heard = {row: [] for row in range(len(keys))}
        said = [[] if self._silent else first_words(*key) for key in keys]
        return prompts, [Reply(row, np.array(ids, np.int32)) for row, ids in enumerate(said)]

    def submit(self, row, turn, length):
        self.heard[row].append((list(turn), length))
        ids, over = ([], True) if self._silent else answer(turn, length)
        self._ready.append(Reply(row, np.array(ids, np.int32), over))

    def collect(self, wait):
        assert self._ready, "nobody asked"
        self.waited += wait
        count = len(self._ready)
        if self._order is not None:
            self._ready = [self._ready[i] for i in self._order.permutation(count)]
            count = self._order.integers(wait, count + 1)
        elif self._lazy:
            count = int(wait)
        now, self._ready = self._ready[:count], self._ready[count:]
        return now

    tokens = ()
    shows = False

    def rewards(self):
        """The number of turns."""
        self._ready = []
        return [float(len(turns)) for turns in self.heard.values()]
