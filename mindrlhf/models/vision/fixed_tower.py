"""Tower that nothing changes, and rows of pictures that it has computed.

Each picture is computed alone, so that its rows are a function of its pixels and of the tower's weights: beside others,
their last bits would depend on the sizes of the batch. Rows are kept in host memory within a limit; they belong to no
phase and are never swapped. The graphs of the text take them as an input, so that a device gets those of one batch at a
time.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from mindspore import Parameter

from mindrlhf import backend
from mindrlhf.backend.compile.graph import Graph
from mindrlhf.backend.operators import Operators
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.inputs import PATCH_PLACES, PATCHES
from mindrlhf.models.parameters import tower_trains
from mindrlhf.models.vision.batch import PictureTable, RowInputs
from mindrlhf.models.vision.rows import tower_rows
from mindrlhf.models.vision.tower import Tower
from mindrlhf.units import DIGEST_BYTES, GIB

if TYPE_CHECKING:  # it imports Pillow, which text does not need
    from mindrlhf.images.processor import Picture

Key = tuple[bytes, bytes]  # digests of a tower and of a picture


class KnownRows:
    """Rows of pictures that a process has computed, within a limit.

    The least recently used ones are forgotten first. limit: bytes of all rows. nbytes: bytes now. found: how often rows
    were known, since the last `collect`; computed: the pictures that were computed.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._rows: dict[Key, np.ndarray] = {}  # the least recently used first
        self.nbytes = 0
        self.found = 0
        self.computed: list[Picture] = []

    def rows_of(self, tower: bytes, picture: "Picture", compute: Callable[["Picture"], np.ndarray]) -> np.ndarray:
        """Return a picture's rows of one tower, computed if they are not known."""
        key = tower, picture.digest
        known = self._rows.pop(key, None)
        if known is not None:
            self.found += 1
            self._rows[key] = known
            return known
        rows = compute(picture)
        self.computed.append(picture)
        if rows.nbytes <= self._limit:
            self._rows[key] = rows
            self.nbytes += rows.nbytes
            self._forget()
        return rows

    def _forget(self) -> None:
        while self.nbytes > self._limit:
            self.nbytes -= self._rows.pop(next(iter(self._rows))).nbytes

    def collect(self) -> tuple[int, list["Picture"]]:
        """Return `found` and `computed`, and begin to count anew."""
        counts = self.found, self.computed
        self.found = 0
        self.computed = []
        return counts


class TowerGraph(Graph):
    """Graph from the patches of pictures to the rows of their tokens (`Tower`)."""

    def __init__(self, tower: Tower):
        super().__init__("tower/rows")
        self.tower = tower

    def construct(self, patches, places):
        return self.tower(patches, places).astype("float32")


class FixedTower:
    """Tower of a model that sees, for decoders without it.

    parameters: by name, the tower's among them. dtype: of matrix products, on which the rows depend.
    """

    def __init__(
        self,
        model: ModelConfig,
        parameters: Mapping[str, Parameter],
        operators: Operators,
        dtype: str,
        known: KnownRows,
    ):
        self._vision = model.vision
        self._width = model.hidden_size
        self._weights = [parameters[spec.name] for spec in tower_rows(model)]
        self._graph = TowerGraph(Tower(model.vision, parameters, operators, {}))
        self._dtype = dtype
        self._known = known

    @property
    def inputs(self) -> RowInputs:
        """Inputs of a decoder without the tower."""
        return RowInputs(self._vision, self._width, self.rows_of)

    def rows_of(self, picture: "Picture") -> np.ndarray:
        """Return the rows of a picture's tokens: float32[tokens, width]."""
        return self._known.rows_of(self._digest, picture, self._compute)

    @cached_property
    def _digest(self) -> bytes:
        """Digest of all that the rows depend on but the picture.

        Models with equal towers, such as a policy and its reference, know each other's rows.
        """
        found = hashlib.blake2b(self._dtype.encode(), digest_size=DIGEST_BYTES)
        for weight in self._weights:
            found.update(np.ascontiguousarray(backend.read(weight)))
        return found.digest()

    def _compute(self, picture: "Picture") -> np.ndarray:
        table = PictureTable([picture], self._vision)
        arrays = table.arrays()
        rows = self._graph.on_arrays(arrays[PATCHES], arrays[PATCH_PLACES]).asnumpy()
        return rows[table.rows(picture)]


def unread_rows(model: ModelConfig) -> RowInputs:
    """Build the inputs of later stages of a pipeline, which read no rows."""
    width = model.hidden_size
    return RowInputs(model.vision, width, lambda picture: np.zeros((picture.tokens, width), np.float32))


def open_known_rows(model: ModelConfig, limit_gb: float) -> KnownRows | None:
    """Open the known rows of a run that trains a model.

    None for text alone, and if the tower trains. limit_gb: GiB.
    """
    if model.vision is None or tower_trains(model):
        return None
    return KnownRows(int(limit_gb * GIB))
