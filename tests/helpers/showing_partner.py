"""A partner whose answers show pictures, for tests: what it says depends on token ids alone."""

import numpy as np
from scripted_partner import ScriptedPartner

from mindrlhf.images.processor import Picture
from mindrlhf.rollout.partner import Reply

IMAGE = 60
LAST_WORD = 40  # text ids are smaller


def words(rng: np.random.Generator, least: int = 0) -> list[int]:
    return rng.integers(2, LAST_WORD, int(rng.integers(least, 4))).tolist()


def with_pictures(rng: np.random.Generator, pictures: list[Picture], most: int) -> tuple[list[int], tuple]:
    """(ids, pictures) of a text with up to `most` of the pictures; it ends with text if it shows any."""
    shown = [pictures[i] for i in rng.integers(0, len(pictures), rng.integers(0, most + 1))]
    ids = words(rng)
    for picture in shown:
        ids += [*[IMAGE] * picture.tokens, *words(rng, least=1)]
    return ids, tuple(shown)


def shown_answer(turn, length: int, pictures: list[Picture]) -> tuple[list[int], tuple, bool]:
    """(ids, pictures, whether the conversation is over) for a turn."""
    rng = np.random.default_rng([*turn, length])
    return *with_pictures(rng, pictures, 1), bool(rng.random() < 0.1)


def shown_first(prompt_id: int, sample: int, pictures: list[Picture]) -> tuple[list[int], tuple]:
    """(ids, pictures) in front of a conversation's first turn."""
    return with_pictures(np.random.default_rng([prompt_id, sample]), pictures, 1)


class ShowingPartner(ScriptedPartner):
    """Answers with pictures; its replies come in the order and at the times of a `ScriptedPartner`."""

    shows = True

    def __init__(self, pictures: list[Picture], order: int | None = None):
        super().__init__(order)
        self._pictures = pictures

    def begin(self, prompts, num_generations, step):
        keys = [(prompt.id, sample) for prompt in prompts for sample in range(num_generations)]
        self.heard = {row: [] for row in range(len(keys))}
        said = [shown_first(*key, self._pictures) for key in keys]
        return prompts, [Reply(row, np.array(ids, np.int32), pictures=own) for row, (ids, own) in enumerate(said)]

    def submit(self, row, turn, length):
        self.heard[row].append((list(turn), length))
        ids, shown, over = shown_answer(turn, length, self._pictures)
        self._ready.append(Reply(row, np.array(ids, np.int32), over, shown))
