"""Weights of a base model with its adapter merged, as a `WeightSource`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.open import Reader, Weights
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.checkpoint.weight_source import WeightSource
from mindrlhf.models.parameters import ParameterSpec, parameter_table
from mindrlhf.parallel.layout import Slices, full_layout


def merged_source(weights: Weights) -> WeightSource:
    """Open an adapter, or a checkpoint of adapters, merged when it is read."""
    path, table = Path(weights.path), parameter_table(weights.model)
    tensors = {spec.name: _Merged(path, spec.name, "float32", spec.shape, (), weights, spec) for spec in table}
    return WeightSource.of(path, full_layout({spec.name: spec.shape for spec in table}), [tensors])


@dataclass(frozen=True)
class _Merged(StoredTensor):
    """Parameter of a base model, merged with its adapter when it is read."""

    weights: Weights
    spec: ParameterSpec

    def read(self, index: Slices | None = None) -> np.ndarray:
        return _reader(self.weights)(self.spec)[index or ()]


@cache
def _reader(weights: Weights) -> Reader:
    """Return this process's reader: processes that write files open the weights themselves."""
    return weights.reader()
