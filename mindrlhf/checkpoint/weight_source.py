"""Weight files of a path, checked against a model and read by tensor."""

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.ckpt_file import index_ckpt
from mindrlhf.checkpoint.encoding import StoredDtype
from mindrlhf.checkpoint.safetensors_file import index_safetensors
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.files.atomic import stays_below
from mindrlhf.files.json import read_json
from mindrlhf.models.parameters import (
    EMBEDDING,
    HEAD,
    ParameterSpec,
    has_fused_projections,
    is_layer_weight,
    parameter_table,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_log = logging.getLogger(__name__)

_BLOCK_ELEMENTS = 1 << 24  # how much of two tensors is compared at a time


def index_weights(path: Path) -> dict[str, StoredTensor]:
    """Index all tensors of a path by name, from headers alone.

    A path is a `.safetensors` or `.ckpt` file, or a folder with (the first that is there) `model.safetensors`, a
    sharded checkpoint with its index, any `.safetensors` files with distinct tensors, one `.ckpt`, or one `rank_*`
    folder of these. Hidden files (unfinished writing) are not seen. Raises `UserError` for anything else and for
    damaged files.
    """
    if not path.exists():
        raise UserError(f"{path}: the path does not exist; give a model folder, a .safetensors or a .ckpt file.")
    if path.is_dir():
        return _index_folder(path)
    if path.suffix == ".safetensors":
        return index_safetensors(path)
    if path.suffix == ".ckpt":
        return index_ckpt(path)
    raise UserError(f"{path}: not a weight file; give a model folder, a .safetensors or a .ckpt file.")


def _index_folder(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE_FILE).exists():
        return index_safetensors(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).exists():
        return _index_shards(folder / INDEX_FILE)
    if files := _visible(folder, "*.safetensors"):
        return _index_together(files)
    if checkpoints := _visible(folder, "*.ckpt"):
        if len(checkpoints) > 1:
            raise UserError(f"{folder}: holds {len(checkpoints)} .ckpt files; give the path of one of them.")
        return index_ckpt(checkpoints[0])
    if ranks := _visible(folder, "rank_*"):
        if len(ranks) > 1:
            raise UserError(f"{folder}: holds the shards of {len(ranks)} ranks; use tools/transform_checkpoint.py.")
        return index_weights(ranks[0])
    hint = " (PyTorch .bin files have to be converted to safetensors first)" if _visible(folder, "*.bin") else ""
    raise UserError(f"{folder}: holds no .safetensors and no .ckpt file{hint}; give the folder with the weights.")


def _index_shards(index_file: Path) -> dict[str, StoredTensor]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"{index_file}: has no weight_map from tensor to file name; get the file again.")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if not stays_below(shard):
            raise UserError(f"{index_file}: names {shard!r}, which is not a file inside of its folder; do not use it.")
        if not (index_file.parent / shard).is_file():
            raise UserError(f"{index_file}: names {shard}, and that file is not beside it; get the missing shard.")
        shards[shard] = index_safetensors(index_file.parent / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(f"{index_file}: says that {name} is in {shard}, and it is not; get both files again.")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def _index_together(files: list[Path]) -> dict[str, StoredTensor]:
    """Index several files without an index file; each tensor must be unique."""
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        found = index_safetensors(file)
        for name in found.keys() & tensors.keys():
            raise UserError(f"{file.parent}: {name} is in both {tensors[name].file.name} and {file.name}; give one.")
        tensors |= found
    return tensors


def _visible(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if not path.name.startswith("."))


@dataclass(frozen=True, eq=False)
class WeightSource:
    """Weights of one model: complete, of the right shapes, not loaded.

    path: as the user gave it. table: the model's parameters. tensors: our name -> stored tensor. unused: names in the
    files that the model has no use for.
    """

    path: Path
    table: tuple[ParameterSpec, ...]
    tensors: Mapping[str, StoredTensor]
    unused: tuple[str, ...]

    @property
    def dtype(self) -> StoredDtype:
        return common_dtype(tensor.dtype for tensor in self.tensors.values())

    def read(self, spec: ParameterSpec, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a parameter, or the part `index`, as an own contiguous float32 array."""
        return self.tensors[spec.name].read(index)


def open_weights(path: str | Path, config: ModelConfig) -> WeightSource:
    """Find and check the weights of a model; nothing is loaded.

    path: a Hugging Face folder (one or several safetensors), a `.safetensors` file with Hugging Face or MindFormers
        names, a MindSpore `.ckpt`, or a folder with one (see `index_weights`).
    Raises `UserError` when a weight is missing, has another shape or a type that is not float, when a file is damaged,
    or when the files hold layers, biases or a head that the configuration does not have: such a model would load and
    be wrong. Other tensors in the files are listed once in the log and left alone.
    """
    path = Path(path)
    stored = index_weights(path)
    table = parameter_table(config)
    names = _names_in_files(path, table, stored)
    for spec in table:
        stored[names[spec.name]].check(spec.shape)
    unused = tuple(sorted(stored.keys() - names.values()))
    _check_unused(config, stored, names, unused)
    note_unused(path, unused)
    return WeightSource(path, table, {spec.name: stored[names[spec.name]] for spec in table}, unused)


def common_dtype(dtypes: Iterable[StoredDtype]) -> StoredDtype:
    """Find the narrowest dtype that holds the numbers of all dtypes exactly."""
    (first, *others) = set(dtypes)
    return "float32" if others else first


def note_unused(path: Path, names: Collection[str]) -> None:
    """Log the tensors of files that are no weights of the model."""
    if names:
        shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
        _log.warning("%s: %d tensors are not part of the model and are not used: %s", path, len(names), shown)


def _names_in_files(path: Path, table: tuple[ParameterSpec, ...], stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Map our names to the files' names, in either naming scheme."""
    conventions = ({spec.name: spec.hf_name for spec in table}, {spec.name: spec.name for spec in table})
    names = max(conventions, key=lambda names: sum(name in stored for name in names.values()))
    missing = [name for name in names.values() if name not in stored]
    if not missing:
        return names
    if len(missing) == len(table):
        example = f" (it begins with {min(stored)})" if stored else ""
        raise UserError(f"{path}: holds no weight of the model under a Hugging Face or MindFormers name{example}.")
    others = f" and {len(missing) - 1} more are missing" if len(missing) > 1 else " is missing"
    if missing == [HEAD]:
        hint = "set tie_word_embeddings to true if the model's head is its embedding"
    elif has_fused_projections(stored):
        hint = "the file was written with qkv_concat: True; write it with qkv_concat: False"
    else:
        hint = "give the weights and the configuration of one model"
    raise UserError(f"{path}: the weight {missing[0]}{others}; {hint}.")


def _check_unused(
    config: ModelConfig, stored: Mapping[str, StoredTensor], names: Mapping[str, str], unused: tuple[str, ...]
) -> None:
    for name in unused:
        if is_layer_weight(name):
            raise UserError(
                f"{stored[name].file}: holds {name}, and the model's configuration ({config.family}, "
                f"{config.num_layers} layers) has no such weight; give the weights and the configuration of one model."
            )
    if HEAD in unused and not _equal(stored[HEAD], stored[names[EMBEDDING]]):
        raise UserError(f"{stored[HEAD].file}: {HEAD} differs from the embedding; drop tie_word_embeddings: true.")


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    rows = max(1, _BLOCK_ELEMENTS // max(1, first.shape[1]))
    return all(
        np.array_equal(first.read((slice(start, start + rows),)), second.read((slice(start, start + rows),)))
        for start in range(0, first.shape[0], rows)
    )
