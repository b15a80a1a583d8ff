"""Weights and architecture that a path names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.adapted import base_path, checkpoint_adapter
from mindrlhf.checkpoint.finite import fault_of
from mindrlhf.checkpoint.hf import CONFIG_FILE, read_hf_config
from mindrlhf.checkpoint.hf_tensors import joined
from mindrlhf.checkpoint.peft import StoredAdapter, is_adapter, read_adapter
from mindrlhf.checkpoint.peft_config import Base
from mindrlhf.checkpoint.resume import Checkpoint, is_checkpoint, newest
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.checkpoint.training_state import WEIGHTS
from mindrlhf.checkpoint.verl_shards import refuse_verl_shards
from mindrlhf.checkpoint.weight_source import WeightSource, fingerprint, open_sharded, open_weights, rank_folders
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import ParameterSpec, kept_rows, parameter_table
from mindrlhf.parallel.layout import Slices, full_layout
from mindrlhf.parallel.partition import Partition

Reader = Callable[[ParameterSpec], np.ndarray]
Index = Callable[[ParameterSpec], Slices | None]
_fingerprints: dict[tuple, str] = {}  # computed by this process: (path, seed, architecture) -> fingerprint


def hf_folder(path: str | Path) -> Path | None:
    """Find the Hugging Face folder of a checkpoint or adapter, or None."""
    if (Path(path) / CONFIG_FILE).is_file():
        return Path(path)
    if is_adapter(path):
        return hf_folder(base_path(path))
    return newest(path, Checkpoint.verify_description).hf_folder if is_checkpoint(path) else None


def checkpoint_config(path: str | None, seeing: bool = False) -> ModelConfig | None:
    """Read the architecture of a checkpoint; None without a configuration.

    seeing: also of a model with images.
    """
    if path is None:
        return None
    if not Path(path).exists():
        raise UserError(f"{path}: no such checkpoint; give an HF directory, hub id, .gguf, .safetensors or .ckpt file.")
    refuse_verl_shards(path)
    folder = hf_folder(path)
    if folder is None and Path(path).is_dir() and not any(Path(path).rglob("*.[cs]*")):
        found = f"{path}: has no {CONFIG_FILE} and no weights"
        raise UserError(f"{found}; give an HF directory, hub id, .gguf, .safetensors or .ckpt file.")
    return None if folder is None else read_hf_config(folder, seeing)


@dataclass(frozen=True)
class Weights:
    """Origin of a role's parameters; with path None they are random from the seed.

    The path may be a training checkpoint in any layout; for a rank it may also hold one folder per rank in its layout.
    An adapter in PEFT's format, or a checkpoint of adapters, is merged into its base model. adapter: a PEFT folder over
    these weights; a model with adapters starts from it, else it is merged. zeros: all are zero, and nothing is read.
    """

    path: str | None
    model: ModelConfig
    seed: int
    adapter: str | None = None
    zeros: bool = False

    def parameters(self, part: Partition | None = None) -> dict:
        """Create float32 parameters by name: the whole model's, or one rank's."""
        from mindrlhf.models.initialize import build_parameters

        return build_parameters(parameter_table(self.model) if part is None else part.specs, self.reader(part))

    def reader(self, part: Partition | None = None) -> Reader:
        """Return a reader of whole parameters, or of one rank's parts."""
        index = _index(part)
        if self.zeros:
            return lambda spec: np.zeros(spec.shape if part is None else part.shape(spec), np.float32)
        weights, merged = self.split()
        read = weights._stored(part, index) if merged is None else weights.merged(merged, part)
        first = self._checked(read_adapter(self.adapter), part) if self.adapter else None
        if self.model.adapter is None:
            return first.over(read, index) if first else read
        adapters = self._random(index) if first is None else lambda spec: joined(spec, first.arrays)[index(spec) or ...]
        return lambda spec: (adapters if spec.adapts else read)(spec)

    def base(self, part: Partition | None = None) -> Base:
        """Identify these weights as a base; the fingerprint is computed once per process."""
        key = self.path, self.seed, repr(self.model.base)
        if key not in _fingerprints:
            _fingerprints[key] = fingerprint(parameter_table(self.model.base), self._sampler(part))
        return Base(self.path and str(Path(self.path).resolve()), _fingerprints[key])

    def merged(self, stored: StoredAdapter, part: Partition | None = None) -> Reader:
        """Return a reader of these weights with an adapter merged into them."""
        if self.path is not None and not Path(self.path).exists():
            found = f"{stored.folder}: is an adapter of {self.path}, and that base model is not there"
            raise UserError(f"{found}; put it back.")
        index = _index(part)
        return self._checked(stored, part).over(self._stored(part, index), index)

    def split(self) -> "tuple[Weights, StoredAdapter | None]":
        """Split a path of adapters into the weights of its base and the adapter."""
        plain = replace(self, model=self.model.base, adapter=None)
        if is_adapter(self.path):
            return replace(plain, path=base_path(self.path)), read_adapter(self.path)
        stored = checkpoint_adapter(newest(self.path)) if self._is_checkpoint else None
        if stored is None:
            return plain, None
        return replace(plain, path=stored.base.name, seed=newest(self.path).run["base"]["seed"]), stored

    def _checked(self, stored: StoredAdapter, part: Partition | None) -> StoredAdapter:
        """Check that an adapter belongs to these weights."""
        name = self.path or "a model of random weights"
        stored.check_fits(self.model.base, name)
        if stored.base.fingerprint is not None:
            stored.check_base(self.base(part).fingerprint, name)
        return stored

    @property
    def _is_checkpoint(self) -> bool:
        return self.path is not None and not (Path(self.path) / CONFIG_FILE).is_file() and is_checkpoint(self.path)

    def _stored(self, part: Partition | None, index: Index) -> Reader:
        """Return a reader of weights that are not an adapter."""
        if self.path is None:
            return self._random(index)
        source = self._source(part)

        def read(spec: ParameterSpec) -> np.ndarray:
            weights = source.read(spec.name, index(spec))
            if fault := fault_of(weights):
                raise source.refusal(spec.name, fault)
            return weights

        return read

    def _source(self, part: Partition | None) -> WeightSource:
        """Open weights that are neither an adapter nor random."""
        shapes = {spec.name: spec.shape for spec in parameter_table(self.model)}
        if self._is_checkpoint:
            return newest(self.path).weights(WEIGHTS, shapes)
        if part is not None and rank_folders(Path(self.path)):
            return open_sharded(Path(self.path), part.layout.only(shapes))
        return open_weights(self.path, self.model)

    def _random(self, index: Index) -> Reader:
        from mindrlhf.models.initialize import random_tensor

        return lambda spec: random_tensor(spec, self.model, self.seed)[index(spec) or ...]

    def _sampler(self, part: Partition | None) -> Callable[[str, Slices], np.ndarray]:
        """Return a reader of parts of whole parameters, for a fingerprint."""
        plain, stored = self.split()
        if self.path is None:
            drawn = np.frombuffer(f"{self.seed} {self.model.initializer_range}".encode(), np.uint8)
            return lambda name, index: drawn
        if stored is not None:
            specs = {spec.name: spec for spec in parameter_table(plain.model)}
            merged = plain.merged(stored)
            return lambda name, index: merged(specs[name])[index]
        return plain._source(part).read


def _index(part: Partition | None) -> Index:
    """Return a function from parameters to the parts that a rank holds."""
    return lambda spec: None if part is None else part.slices(spec)


def checkpoint_reader(checkpoint: Checkpoint, kind: str, model: ModelConfig, part: Partition | None = None) -> Reader:
    """Return a reader of a training checkpoint's parameters, or one rank's parts."""
    weights = checkpoint.weights(kind, {spec.name: spec.shape for spec in kept_rows(model)})
    index = _index(part)
    return lambda spec: weights.read(spec.name, index(spec))


def continued_reader(checkpoint: Checkpoint, first: Weights, part: Partition) -> Reader:
    """Return a reader of one rank's policy when a run continues."""
    read = checkpoint_reader(checkpoint, WEIGHTS, part.model, part)
    if part.kept_layout == part.layout:
        return read
    kept = {spec.name for spec in kept_rows(part.model)}
    unchanged = replace(first, adapter=None).reader(part)
    return lambda spec: (read if spec.name in kept else unchanged)(spec)


def merged_source(weights: Weights) -> WeightSource:
    """Open an adapter, or a checkpoint of adapters, merged when it is read."""
    path = Path(weights.path)
    table = parameter_table(weights.model)
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
