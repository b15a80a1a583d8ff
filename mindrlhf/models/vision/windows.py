"""Order of an image's patches in the vision tower: squares, and windows of squares.

An image token is a square of merge x merge patches. The tower's patches come square by square, and within a square
line by line. Most of its blocks attend within windows, squares of tokens from the image's upper left corner on; those
at the right and lower edges may be smaller. NumPy only.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from mindrlhf.images.sizes import Grid, image_tokens


def window_order(grids: Iterable[Grid], side: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """List the tokens of images window by window.

    side: of a window, in tokens. Returns the tokens' indices, int64, counted over all images, and the number of patches
    of each window.
    """
    order = [np.empty(0, np.int64)]
    sizes = []
    first = 0
    for grid in grids:
        frames, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
        tokens = first + np.arange(frames * rows * columns).reshape((frames, rows, columns))
        for frame in tokens:
            for top in range(0, rows, side):
                for left in range(0, columns, side):
                    window = frame[top : top + side, left : left + side]
                    order.append(window.reshape(-1))
                    sizes.append(window.size * merge**2)
        first += tokens.size
    return np.concatenate(order), np.array(sizes, np.int64)


def frame_sizes(grids: Iterable[Grid]) -> np.ndarray:
    """Count the patches of each frame of images, within which the other blocks attend."""
    return np.array([rows * columns for frames, rows, columns in grids for _ in range(frames)], np.int64)


def bounds(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Sum sizes to bounds: 0, and the end of each run."""
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)


def patch_places(grids: Iterable[Grid], merge: int) -> np.ndarray:
    """List row and column of each patch, in the tower's order: int64[patches, 2]."""
    places = [np.empty((0, 2), np.int64)]
    for frames, rows, columns in grids:
        shape = (rows // merge, merge, columns // merge, merge)
        both = np.indices((rows, columns)).reshape((2, *shape)).transpose((1, 3, 2, 4, 0)).reshape((-1, 2))
        places.append(np.tile(both, (frames, 1)))
    return np.concatenate(places)


def padded_places(grid: Grid, side: int, merge: int) -> np.ndarray:
    """Give each token of a still image a place in padded windows: int64[tokens].

    A window has side^2 places; its tokens come first.
    """
    order, sizes = window_order([grid], side, merge)
    starts = np.repeat(np.arange(len(sizes)) * side**2, sizes // merge**2)
    within = np.arange(len(order)) - np.repeat(bounds(sizes // merge**2)[:-1], sizes // merge**2)
    places = np.empty(image_tokens(grid, merge), np.int64)
    places[order] = starts + within
    return places


def window_count(grid: Grid, side: int, merge: int) -> int:
    """Count the windows of an image."""
    frames, rows, columns = grid
    return frames * -(-rows // (side * merge)) * -(-columns // (side * merge))
