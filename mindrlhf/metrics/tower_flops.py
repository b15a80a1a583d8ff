"""Operations of a vision tower: its matrix products, for each image once.

Padding is not counted. A prompt's images are computed once for all answers to it, in each pass of a model.
"""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.vision import VisionConfig
from mindrlhf.images.sizes import Grid
from mindrlhf.models.parameters import trained_parts


class TowerFlops(NamedTuple):
    """Operations of the blocks with the patches' embedding, and of the merger."""

    blocks: float = 0.0
    merger: float = 0.0


def tower_flops(model: ModelConfig, images: Iterable[Grid]) -> TowerFlops:
    """Count the operations of a forward pass over images.

    A model of text has none.
    """
    vision = model.vision
    if vision is None:
        return TowerFlops()
    width = vision.hidden_size
    square = vision.merge_size**2
    whole = vision.whole_blocks
    matrices = 2 * width * (prod(vision.patch_shape) + vision.depth * (4 * width + 3 * vision.intermediate_size))
    merged = square * width
    merging = 2 * merged * (merged + model.hidden_size)
    blocks = merger = 0.0
    for frames, rows, columns in images:
        patches = frames * rows * columns
        near = frames * _squares(rows, vision) * _squares(columns, vision)
        seen = whole * frames * (rows * columns) ** 2 + (vision.depth - whole) * near
        blocks += matrices * patches + 4 * width * seen
        merger += merging * patches // square
    return TowerFlops(blocks, merger)


def tower_update_flops(model: ModelConfig, images: Iterable[Grid], passes: int) -> float:
    """Count the operations of an update over images.

    passes: of a whole model's update, a forward pass and as much work for the gradients of inputs and of weights.
    Inputs of a part have no gradients if nothing before or in it trains, and frozen weights and those under adapters
    have none.
    """
    if model.vision is None:
        return 0.0
    blocks, merger = tower_flops(model, images)
    moving = trained_parts(model)
    weights = frozenset() if model.adapter else moving
    of_blocks = passes - ("vision" not in moving) - ("vision" not in weights)
    of_merger = passes - (not moving & {"vision", "merger"}) - ("merger" not in weights)
    return of_blocks * blocks + of_merger * merger


def _squares(length: int, vision: VisionConfig) -> int:
    """Sum the squared lengths of the windows along a side of patches."""
    side = vision.window_side * vision.merge_size
    windows, rest = divmod(length, side)
    return windows * side**2 + rest**2
