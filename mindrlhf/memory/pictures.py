"""Lengths of a job's longest prompts, and sizes of their pictures. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import NamedTuple

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.images.sizes import Grid, image_tokens
from mindrlhf.models.vision.batch import few_sizes
from mindrlhf.models.vision.windows import window_count
from mindrlhf.types import Prompt


class Padded(NamedTuple):
    """Sizes of a batch for the tower: pictures, and padded patches of each."""

    count: int
    patches: int

    @property
    def rows(self) -> int:
        """Padded patches of all pictures."""
        return self.count * self.patches


@dataclass(frozen=True)
class Pictures:
    """Bound of a prompt's pictures: the most, each as large as the largest.

    grid: frames, rows and columns of the largest one's patches. merge: side of a token, in patches. different: tokens
    of all pictures that prompts show, each counted once; None if the prompts are not known.
    """

    count: int = 0
    grid: Grid = (0, 0, 0)
    merge: int = 1
    different: int | None = None

    @classmethod
    def of(cls, prompts: Sequence[Prompt], vision: VisionConfig | None) -> "Pictures":
        """Find the bounds of prompts; none for a model of text."""
        every = {picture.digest: picture for prompt in prompts for picture in prompt.pictures}
        if vision is None or not every:
            return cls()
        sides = vision.window_side, vision.merge_size
        grids = [picture.grid for picture in every.values()]
        largest = max(grids, key=lambda grid: (window_count(grid, *sides), grid))
        different = sum(image_tokens(grid, vision.merge_size) for grid in grids)
        return cls(max(len(prompt.pictures) for prompt in prompts), largest, vision.merge_size, different)

    @classmethod
    def of_tokens(cls, tokens: int, vision: VisionConfig) -> "Pictures":
        """Assume one picture of at least this many tokens, nearly square."""
        if tokens < 1:
            return cls()
        side = isqrt(tokens)
        high = next((size for size in range(side, 0, -1) if tokens % size == 0 and 2 * size >= side), side)
        merge = vision.merge_size
        return cls(1, (1, high * merge, -(-tokens // high) * merge), merge)

    @property
    def grids(self) -> list[Grid]:
        """Grid of each picture."""
        return [self.grid] * self.count

    @property
    def tokens(self) -> int:
        """Tokens of one picture."""
        return image_tokens(self.grid, self.merge)

    def padded(self, prompts: int, vision: VisionConfig) -> Padded:
        """Compute the sizes of a batch; one without pictures has one of padding."""
        windows = window_count(self.grid, vision.window_side, vision.merge_size)
        return Padded(few_sizes(prompts * self.count), few_sizes(windows) * vision.window_patches)

    def padded_rows(self, prompts: int) -> int:
        """Count the padded rows of a batch whose tower runs outside of its graph."""
        return few_sizes(prompts * self.count * self.tokens)


NO_PICTURES = Pictures()


@dataclass(frozen=True)
class Lengths:
    """Lengths of the longest prompt and held-out problem, and their pictures.

    prompt, problem: tokens. problems: number of held-out problems.
    """

    prompt: int
    problems: int = 0
    problem: int = 0
    pictures: Pictures = NO_PICTURES
    problem_pictures: Pictures = NO_PICTURES

    @property
    def different_tokens(self) -> int | None:
        """Tokens of all pictures, each counted once; None if they are not known."""
        found = [one.different for one in (self.pictures, self.problem_pictures) if one.count]
        return None if None in found else sum(found)
