"""Arrays of a batch's pictures and positions, with or without the vision tower.

A decoder with its tower takes patches (`PatchInputs`), one without it the rows that the tower has computed before
(`RowInputs`). A picture that several sequences of a batch show is in the arrays once. Sizes are padded to few different
ones, each of which is a compiled graph; a batch without pictures has one of padding, so that its graph trains the tower
too. NumPy only.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mindrlhf.configs.vision import VisionConfig
from mindrlhf.models.inputs import COLUMNS, IMAGE_ROWS, LINES, PATCH_PLACES, PATCHES, TOWER_ROWS
from mindrlhf.models.vision.positions import image_starts, token_positions
from mindrlhf.models.vision.windows import padded_places, patch_places, window_count

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

TIMES = "positions"
PADDING = -1  # in places of patches
ByPosition = dict[str, tuple[np.ndarray, np.ndarray]]


class Sequences(Protocol):
    """Prompt with responses and the pictures of each (`training.batch.SequenceGroup`)."""

    prompt_ids: np.ndarray
    responses: tuple[np.ndarray, ...]
    pictures: tuple[tuple["Picture", ...], ...]


class KnownSizes:
    """Sizes of pictures' arrays that have graphs already.

    They are pairs: numbers of pictures and of a picture's windows, or 1 and a number of rows.
    """

    def __init__(self) -> None:
        self._known: list[tuple[int, int]] = []

    def smallest(self, count: int, size: int) -> tuple[int, int]:
        """Choose the smallest known sizes that hold these, or new ones."""
        needed = few_sizes(count), few_sizes(size)
        fitting = [size for size in self._known if size[0] >= needed[0] and size[1] >= needed[1]]
        if not fitting:
            self._known.append(needed)
        return min(fitting, default=needed, key=math.prod)


class Table(Protocol):
    """Pictures of a batch, each once."""

    def rows(self, picture: "Picture") -> np.ndarray:
        """List the place of each token of a picture in the tower's rows: int64[tokens]."""

    def arrays(self) -> dict[str, np.ndarray]:
        """Build the arrays of the pictures by name."""


class PictureInputs(Protocol):
    """Builder of a decoder's inputs from pictures.

    names: of the arrays, in order.
    """

    @property
    def vision(self) -> VisionConfig: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def table(self, pictures: Sequence["Picture"], sizes: KnownSizes) -> Table:
        """Choose the arrays' sizes, among known ones, and the places of a batch's pictures."""


class PictureTable:
    """Pictures of a batch, each once, with their rows of the tower's output.

    sizes: known ones, to choose from.
    """

    def __init__(self, pictures: Sequence["Picture"], vision: VisionConfig, sizes: KnownSizes | None = None):
        self.vision = vision
        self.pictures = list({picture.digest: picture for picture in pictures}.values())
        sides = vision.window_side, vision.merge_size
        self._own = [padded_places(picture.grid, *sides) for picture in self.pictures]  # of tokens, among a picture's
        windows = [window_count(picture.grid, *sides) for picture in self.pictures]
        self.count, most = (sizes or KnownSizes()).smallest(len(self.pictures), max(windows, default=0))
        self.tokens = most * vision.window_side**2
        pairs = zip(self.pictures, self._own, strict=True)
        self._rows = {picture.digest: i * self.tokens + own for i, (picture, own) in enumerate(pairs)}

    def rows(self, picture: "Picture") -> np.ndarray:
        """List the tower's row of each token of a picture: int64[tokens]."""
        return self._rows[picture.digest]

    def arrays(self) -> dict[str, np.ndarray]:
        """Build the tower's inputs by name (`tower.Tower`)."""
        square = self.vision.merge_size**2
        patches = np.zeros((self.count, self.tokens, square, int(np.prod(self.vision.patch_shape))), np.float32)
        places = np.full((self.count, self.tokens, square, 2), PADDING, np.int32)
        for i, (picture, own) in enumerate(zip(self.pictures, self._own, strict=True)):
            patches[i, own] = picture.patches().reshape((len(own), square, -1))
            places[i, own] = patch_places([picture.grid], self.vision.merge_size).reshape((len(own), square, 2))
        shape = (self.count, self.tokens * square, -1)
        return {PATCHES: patches.reshape(shape), PATCH_PLACES: places.reshape(shape)}


class RowTable:
    """Pictures of a batch, each once, with rows that the tower has computed.

    sizes: known ones, to choose from.
    """

    def __init__(self, pictures: Sequence["Picture"], inputs: "RowInputs", sizes: KnownSizes):
        self._inputs = inputs
        self._pictures = {picture.digest: picture for picture in pictures}
        self._firsts: dict[bytes, int] = {}
        used = 0
        for digest, picture in self._pictures.items():
            self._firsts[digest] = used
            used += picture.tokens
        _, self.count = sizes.smallest(1, used)

    def rows(self, picture: "Picture") -> np.ndarray:
        return self._firsts[picture.digest] + np.arange(picture.tokens)

    def arrays(self) -> dict[str, np.ndarray]:
        rows = np.zeros((self.count, self._inputs.width), np.float32)
        for digest, picture in self._pictures.items():
            first = self._firsts[digest]
            rows[first : first + picture.tokens] = self._inputs.rows_of(picture)
        return {TOWER_ROWS: rows}


@dataclass(frozen=True)
class PatchInputs:
    """Inputs of a decoder with its tower: the patches of a batch's pictures."""

    vision: VisionConfig
    names: tuple[str, ...] = (PATCHES, PATCH_PLACES)

    def table(self, pictures: Sequence["Picture"], sizes: KnownSizes) -> PictureTable:
        return PictureTable(pictures, self.vision, sizes)


@dataclass(frozen=True)
class RowInputs:
    """Inputs of a decoder without its tower: the rows of a batch's pictures.

    width: of the text. rows_of: picture -> float32[tokens, width], in the order of its tokens.
    """

    vision: VisionConfig
    width: int
    rows_of: Callable[["Picture"], np.ndarray]
    names: tuple[str, ...] = (TOWER_ROWS,)

    def table(self, pictures: Sequence["Picture"], sizes: KnownSizes) -> RowTable:
        return RowTable(pictures, self, sizes)


def image_arrays(
    groups: Sequence[Sequences],
    shape: tuple[int, int, int, int],
    inputs: PictureInputs,
    sizes: KnownSizes | None = None,
) -> tuple[ByPosition, Mapping[str, np.ndarray]]:
    """Build the inputs of a decoder that sees, for some groups.

    shape: (N, G, P, R) of the batch (`training.batch.MicroBatch`). sizes: known ones, to choose from.

    Returns arrays of the positions of prompts and completions, and those of the pictures, both by name.
    """
    count, samples, prefix, response = shape
    names = (TIMES, LINES, COLUMNS, IMAGE_ROWS)
    prefixes = np.zeros((len(names), count, prefix), np.int32)
    rows = np.zeros((len(names), count * samples, response), np.int32)
    pictures = [one for group in groups for part in group.pictures for one in part]
    table = inputs.table(pictures, sizes or KnownSizes())
    for n, group in enumerate(groups):
        last = len(group.prompt_ids) - 1
        for g, found in enumerate(_sequences(group, inputs.vision, table)):
            own = found[:, last:-1]  # from the last prompt token to the last but one of the response
            rows[:, n * samples + g, : own.shape[1]] = own
            prefixes[:, n, :last] = found[:, :last]
    by_position = {name: (prefixes[i], rows[i]) for i, name in enumerate(names)}
    return by_position, table.arrays()


def _sequences(group: Sequences, vision: VisionConfig, table: Table) -> Iterator[np.ndarray]:
    """Yield time, line, column and image row of each response with its prompt.

    They are int32[4, P + R].
    """
    token = vision.image_token_id
    merge = vision.merge_size
    for g, response in enumerate(group.responses):
        ids = np.concatenate([group.prompt_ids, response])
        pictures = [*group.pictures[0], *group.pictures[1 + g]] if group.pictures else []
        grids = [picture.grid for picture in pictures]
        positions, _ = token_positions(ids, grids, token, merge)
        seen = np.zeros(len(ids), np.int32)
        for start, picture in zip(image_starts(ids, grids, token, merge), pictures, strict=True):
            seen[start : start + picture.tokens] = 1 + table.rows(picture)
        yield np.concatenate([positions, seen[None]])


def few_sizes(number: int) -> int:
    """Round up to a power of two, or to three times one."""
    power = 1
    while power < number:
        if 3 * power // 2 >= number and power > 1:
            return 3 * power // 2
        power *= 2
    return power
