"""Sizes of resized images, and numbers of their patches and tokens."""

import math

from mindrlhf.configs.images import ImageSettings
from mindrlhf.errors import UserError

MOST_ELONGATED = 200
"""Longer side over shorter side, at most, as in Hugging Face's processor."""

Grid = tuple[int, int, int]
"""Frames, rows and columns of an image's patches: `image_grid_thw`."""


def check_sides(height: int, width: int, where: str) -> None:
    """Raise UserError if a side is too long for the other one."""
    short = min(height, width)
    if short < 1 or max(height, width) > MOST_ELONGATED * short:
        found = f"the image has {width} x {height} pixels"
        raise UserError(f"{where}: {found}, and one side may be at most {MOST_ELONGATED} times the other; cut it.")


def resized_size(height: int, width: int, settings: ImageSettings, where: str) -> tuple[int, int]:
    """Choose (height, width) of the resized image, multiples of `settings.factor` near the image's shape.

    The rule is `smart_resize` of Hugging Face's processor, with its corners: sides round half to even, may round to 0
    before they are enlarged, and the bounds are not tried again after a side has changed. Raises UserError.
    """
    check_sides(height, width, where)
    unit = settings.factor
    rows = round(height / unit) * unit
    columns = round(width / unit) * unit
    if rows * columns > settings.max_pixels:
        shrink = math.sqrt((height * width) / settings.max_pixels)
        rows = max(unit, math.floor(height / shrink / unit) * unit)
        columns = max(unit, math.floor(width / shrink / unit) * unit)
    elif rows * columns < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height * width))
        rows = math.ceil(height * grow / unit) * unit
        columns = math.ceil(width * grow / unit) * unit
    return rows, columns


def image_tokens(grid: Grid, merge_size: int) -> int:
    """Count an image's tokens in a prompt."""
    frames, rows, columns = grid
    return frames * rows * columns // merge_size**2
