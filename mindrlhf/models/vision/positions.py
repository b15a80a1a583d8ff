"""Rotary positions of the vision tower's patches and of text with images. NumPy only.

In text with images a position has three numbers: time, row and column. Text moves all three together; an image's
tokens share the time, and count rows and columns from there. The angles' pairs are divided into sections, each with
one of the three (multimodal rotary embedding, Wang et al. 2024, arXiv:2409.12191, section 2.1).
"""

from collections.abc import Sequence

import numpy as np

from mindrlhf.images.sizes import Grid, image_tokens

POSITION_AXES = 3
"""Numbers of a position: time, row, column."""
TOWER_THETA = 10000.0
"""Base of the tower's rotary embedding, which configurations do not name."""


def tower_angles(size: int, head_dim: int) -> np.ndarray:
    """Compute the angles of the first rows or columns: float64[size, head_dim / 4]."""
    half = head_dim // 2
    return np.arange(size)[:, None] * TOWER_THETA ** -(np.arange(0, half, 2) / half)


def tower_rotary(places: np.ndarray, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Compute cos and sin of patches at (row, column) int[patches, 2]: float32[patches, head_dim].

    The first half of the pairs turns with the row, the second with the column; the angles are written twice.
    """
    table = tower_angles(int(places.max(initial=0)) + 1, head_dim)
    angles = table[places].reshape((len(places), head_dim // 2))
    angles = np.concatenate([angles, angles], 1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def token_positions(ids: np.ndarray, grids: Sequence[Grid], image_token: int, merge: int) -> tuple[np.ndarray, int]:
    """Compute the positions of a sequence with images: int32[3, T], and its delta.

    ids: int[T], in which each image has a run of `image_token`, one for each of its tokens; grids: of the images in
    their order. delta: the position of the next token minus T, at most 0; text that follows counts on from there.
    Raises ValueError if the runs are not those of the images.
    """
    positions = np.empty((POSITION_AXES, len(ids)), np.int32)
    starts = image_starts(ids, grids, image_token, merge)
    place = position = 0
    for start, (_, rows, columns) in zip(starts, grids, strict=True):
        text = start - place
        positions[:, place:start] = position + np.arange(text)
        position += text
        high, wide = rows // merge, columns // merge
        place = start + high * wide
        positions[0, start:place] = position
        positions[1, start:place] = position + np.repeat(np.arange(high), wide)
        positions[2, start:place] = position + np.tile(np.arange(wide), high)
        position += max(high, wide)
    positions[:, place:] = position + np.arange(len(ids) - place)
    return positions, position - place


def image_starts(ids: np.ndarray, grids: Sequence[Grid], image_token: int, merge: int) -> list[int]:
    """Find the place of each image's first token.

    Raises ValueError if the tokens are not those of the images.
    """
    places = np.flatnonzero(np.asarray(ids) == image_token)
    counts = [image_tokens(grid, merge) for grid in grids]
    if any(grid[0] != 1 for grid in grids):
        raise ValueError("a still image has one frame")
    if len(places) != sum(counts):
        raise ValueError(f"{len(places)} image tokens were given for images of {sum(counts)} tokens")
    firsts = [int(places[end - count]) for end, count in zip(np.cumsum(counts), counts, strict=True)]
    for first, count in zip(firsts, counts, strict=True):
        if not (ids[first : first + count] == image_token).all():
            raise ValueError(f"the {count} tokens of an image at place {first} are not beside each other")
    return firsts


def section_spans(sections: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """List (axis, start, end) of each section of the angles' pairs.

    Axes take turns: time, row, column.
    """
    ends = np.cumsum(sections).tolist()
    spans = zip([0, *ends], ends, strict=False)
    return tuple((section % POSITION_AXES, start, end) for section, (start, end) in enumerate(spans))
