"""Parameters of a model: created from a weight source, or at random."""

import zlib
from collections.abc import Callable, Iterable

import numpy as np
from mindspore import Parameter, Tensor

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import ParameterSpec


def random_tensor(spec: ParameterSpec, config: ModelConfig, seed: int) -> np.ndarray:
    """Draw the first values of a parameter, float32 of `spec.shape`.

    Norms are 1, biases 0, the rest normal with `initializer_range`, as HF initialises Qwen2.
    Keyed by (seed, name), so that a parameter does not depend on the others or their order.
    """
    if spec.kind == "norm":
        return np.ones(spec.shape, np.float32)
    if spec.kind == "bias":
        return np.zeros(spec.shape, np.float32)
    generator = np.random.Generator(np.random.Philox(key=(seed << 32) + zlib.crc32(spec.name.encode())))
    values = generator.standard_normal(spec.shape, dtype=np.float32)
    values *= config.initializer_range
    return values


def build_parameters(
    specs: Iterable[ParameterSpec], read: Callable[[ParameterSpec], np.ndarray]
) -> dict[str, Parameter]:
    """Create float32 parameters by name, in the order of `specs`.

    read: gives each tensor, or the part of it that is held.
    """
    return {
        spec.name: Parameter(Tensor(np.ascontiguousarray(read(spec), np.float32)), name=spec.name) for spec in specs
    }
