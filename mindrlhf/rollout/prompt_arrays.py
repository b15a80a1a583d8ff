"""Inputs of prefill: prompts padded to one shape, and their pictures.

A picture that several prompts show is in the arrays once, and a prompt is prefilled once for all its answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mindrlhf.models.decoder import Decoder
from mindrlhf.models.inputs import NAMES
from mindrlhf.models.vision.batch import TIMES, KnownSizes, image_arrays
from mindrlhf.types import Prompt

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

NOTHING = np.zeros(0, np.int32)


@dataclass(frozen=True, eq=False)
class _Unanswered:
    """Prompt before its responses (`models.vision.batch.Sequences`)."""

    prompt_ids: np.ndarray
    pictures: tuple[tuple["Picture", ...], ...]
    responses: tuple[np.ndarray, ...] = (NOTHING,)


class PromptArrays:
    """Builder of the arrays that the prefill graph of a decoder takes."""

    def __init__(self, decoder: Decoder):
        self._pictures = decoder.pictures
        self._further = decoder.inputs[len(NAMES) :]
        self._sizes = KnownSizes()

    def __call__(self, prompts: Sequence[Prompt], shape: tuple[int, int]) -> list[np.ndarray]:
        """Pad prompts, without their last tokens, to `shape`.

        Returns ids, positions, and the decoder's further inputs.
        """
        ids = np.zeros(shape, np.int32)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt.token_ids) - 1] = prompt.token_ids[:-1]
        if self._pictures is None:
            return [ids, np.tile(np.arange(shape[1], dtype=np.int32), shape[0])]
        alone = [_Unanswered(prompt.token_ids, (prompt.pictures, ())) for prompt in prompts]
        count, size = shape
        seen, images = image_arrays(alone, (count, 1, size, 1), self._pictures, self._sizes)
        arrays = {name: prefixes.reshape((-1,)) for name, (prefixes, _) in seen.items()} | dict(images)
        return [ids, arrays[TIMES], *(arrays[name] for name in self._further)]
