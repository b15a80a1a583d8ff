"""Weights packed for decoding, alongside the float32 ones."""

from collections.abc import Iterable, Mapping

import numpy as np
from mindspore import Parameter, Tensor

from mindrlhf import backend
from mindrlhf.backend.native import packing
from mindrlhf.models.parameters import ParameterSpec


class PackedWeights:
    """Packed copies of the matrices that decode steps multiply by.

    weights: bfloat16 or int8. specs: rows of the parameter table. parameters: float32, by name. rows: the rows that
    this rank needs of some parameters, by name. lasts: they stay packed until a weight changes; otherwise all are
    packed by each `refresh`, and mean nothing before the first. `packed` has int32[out, words] by name, or
    int32[experts, out, words].
    """

    def __init__(
        self,
        weights: str,
        specs: Iterable[ParameterSpec],
        parameters: Mapping[str, Parameter],
        rows: Mapping[str, slice] | None = None,
        lasts: bool = True,
    ):
        self.weights = weights
        self._parameters = parameters
        self._rows = rows or {}
        self.packed: dict[str, Parameter] = {}
        self.trained: set[str] = set()
        for spec in specs:
            *stack, inputs = self._matrix(spec.name).shape
            values = Tensor(np.empty((*stack, packing.row_words(weights, inputs)), np.int32))
            self.packed[spec.name] = Parameter(values, name=f"packed.{spec.name}", requires_grad=False)
            if spec.trains:
                self.trained.add(spec.name)
        self._refreshed = self.trained if lasts else set(self.packed)
        if lasts:
            self._pack(self.packed)

    def refresh(self) -> None:
        """Pack the matrices again that have changed."""
        self._pack(self._refreshed)

    def parameters(self, trained: bool) -> list[Parameter]:
        """List the packed copies of weights that train, or of the others."""
        return [packed for name, packed in self.packed.items() if (name in self.trained) == trained]

    def _matrix(self, name: str) -> np.ndarray:
        """Read a matrix, or a stack of matrices."""
        matrix = backend.read(self._parameters[name])
        return matrix[self._rows[name]] if name in self._rows else matrix

    def _pack(self, names: Iterable[str]) -> None:
        with backend.rewriting({name: self.packed[name] for name in names}) as arrays:
            for name, packed in arrays.items():
                matrix = self._matrix(name)
                pairs = zip(matrix, packed, strict=True) if matrix.ndim > 2 else ((matrix, packed),)
                for one, words in pairs:
                    packing.pack(self.weights, one, words)
