"""Creation of a model's parameters, from a weight source or at random."""

import zlib
from collections.abc import Callable, Iterable

import numpy as np
from mindspore import Parameter, Tensor

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.parameters import ParameterSpec


def random_tensor(spec: ParameterSpec, config: ModelConfig, seed: int) -> np.ndarray:
    """Draw the initial values of a parameter, float32 of `spec.shape`.

    Norms are 1, biases 0, the rest normal with deviation `initializer_range`, as HF initialises Qwen2. An adapter's A
    follows `Adapter.init` and its B is 0, so that it adds nothing at first.
    The numbers are keyed by (seed, name), so that a parameter does not depend on the others or their order.
    """
    if spec.kind == "norm":
        return np.ones(spec.shape, np.float32)
    if spec.kind in ("bias", "lora_b"):
        return np.zeros(spec.shape, np.float32)
    generator = np.random.Generator(np.random.Philox(key=(seed << 32) + zlib.crc32(spec.name.encode())))
    rank = spec.shape[-2] if spec.adapts else 0
    inputs = spec.shape[-1]
    if spec.kind == "lora_a" and config.adapter.init == "kaiming":
        return (generator.random(spec.shape, dtype=np.float32) * 2 - 1) / np.float32(np.sqrt(inputs))
    values = generator.standard_normal(spec.shape, dtype=np.float32)
    values *= 1 / rank if spec.kind == "lora_a" else config.initializer_range
    return values


def build_parameters(
    specs: Iterable[ParameterSpec], read: Callable[[ParameterSpec], np.ndarray]
) -> dict[str, Parameter]:
    """Create float32 parameters by name, in the order of `specs`.

    read: returns each tensor, or this rank's part of it.
    """
    return {
        spec.name: Parameter(Tensor(np.ascontiguousarray(read(spec), np.float32)), name=spec.name) for spec in specs
    }
