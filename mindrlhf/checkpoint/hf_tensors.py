"""Parameters as the tensors of a Hugging Face checkpoint."""

from collections.abc import Iterator, Mapping

import numpy as np

from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.parallel.layout import slices_of


def split(spec: ParameterSpec, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Cut a whole parameter into (name, tensor)."""
    if array.shape != spec.shape:
        raise ValueError(f"{spec.name} should have shape {spec.shape}, got {array.shape}")
    for tensor in spec.hf_tensors:
        yield tensor.name, array[slices_of(tensor.box)].reshape(tensor.shape)


def joined(spec: ParameterSpec, tensors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Put a whole parameter together, float32."""
    array = np.empty(spec.shape, np.float32)
    for tensor in spec.hf_tensors:
        array[slices_of(tensor.box)] = tensors[tensor.name]
    return array
