"""Weight files of a path, whole or cut over ranks, checked against a model."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from mindrlhf.checkpoint.ckpt_file import index_ckpt, write_ckpt
from mindrlhf.checkpoint.mcore import mcore_tensor
from mindrlhf.checkpoint.safetensors_file import index_safetensors, write_safetensors
from mindrlhf.checkpoint.stored_tensor import STORAGE, StoredDtype, StoredTensor
from mindrlhf.checkpoint.verl_shards import refuse_verl_shards
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.files.text import some
from mindrlhf.hub.models import INDEX, WHOLE, read_weight_map
from mindrlhf.models.parameters import (
    EMBEDDING,
    HEAD,
    HfTensor,
    ParameterSpec,
    has_fused_projections,
    is_layer_weight,
    is_model_weight,
    parameter_table,
)
from mindrlhf.parallel.layout import (
    Box,
    Layout,
    Shape,
    Slices,
    box_shape,
    full_layout,
    inside,
    overlap,
    selected,
    sliced_shape,
    slices_of,
)
from mindrlhf.reshard.strategy import Strategy

SINGLE_FILE = WHOLE
INDEX_FILE = INDEX

Tensors = Mapping[str, StoredTensor]

_log = logging.getLogger(__name__)

_RANK_FOLDER = re.compile(r"rank_(\d+)")
_SAMPLED_ROWS = 16  # of each parameter at least, or all of them if it has fewer
_BLOCK_ELEMENTS = 1 << 24  # elements of two tensors that are compared at a time
_ADVICE = "give the layout that the checkpoint was written in"


@dataclass(frozen=True, eq=False)
class WeightSource:
    """Weights in files: complete, of the right shapes, not loaded.

    path: as the user gave it. shapes: of whole parameters. parts: parameter -> box in it -> part, each once.
    """

    path: Path
    shapes: Mapping[str, Shape]
    parts: Mapping[str, Mapping[Box, StoredTensor]]

    @classmethod
    def of(cls, path: Path, layout: Layout, ranks: Mapping[int, Tensors]) -> "WeightSource":
        """Take each part of a layout from the first holder that has it.

        Raises LookupError for a part that no holder has, or that has another shape.
        """
        parts: dict[str, dict[Box, StoredTensor]] = {name: {} for name in layout.placements}
        for name, found in parts.items():
            for box, holders in layout.holders(name).items():
                tensor = next((ranks[rank][name] for rank in holders if name in ranks[rank]), None)
                if tensor is None or tensor.shape != box_shape(box):
                    raise LookupError(f"rank {holders[0]} has no such part of {name}")
                found[box] = tensor
        return cls(path, layout.shapes, parts)

    @cached_property
    def dtypes(self) -> dict[str, StoredDtype]:
        """Narrowest dtype that holds each parameter exactly."""
        return {name: common_dtype(tensor.dtype for tensor in parts.values()) for name, parts in self.parts.items()}

    @property
    def dtype(self) -> StoredDtype:
        return common_dtype(self.dtypes.values())

    @property
    def files(self) -> set[Path]:
        return {tensor.file for parts in self.parts.values() for tensor in parts.values()}

    def only(self, names: Iterable[str]) -> "WeightSource":
        """Select some parameters, in the given order."""
        shapes = {name: self.shapes[name] for name in names}
        return replace(self, shapes=shapes, parts={name: self.parts[name] for name in shapes})

    def refusal(self, name: str, fault: str) -> UserError:
        """Explain that a parameter holds what no trained weights do."""
        tensor = next(iter(self.parts[name].values()))
        files = some(sorted({str(part.file) for part in self.parts[name].values()}))
        return UserError(f"{files}: tensor {tensor.name} holds {fault}; get weights that were trained without.")

    def read(self, name: str, index: Slices | None = None) -> np.ndarray:
        """Read a parameter, or the part `index`, as a new contiguous float32 array.

        At most one further part is in memory. index: a slice for each dimension, which may have a step.
        """
        parts = self.parts[name]
        if len(parts) == 1:
            return next(iter(parts.values())).read(index)
        shape = self.shapes[name]
        index = index or (slice(None),) * len(shape)
        box = selected(index, shape)
        array = np.empty(box_shape(box), np.float32)
        for part, tensor in parts.items():
            common = overlap(part, box)
            if common == box:
                own = inside(common, part)
                return tensor.read(tuple(slice(a.start, a.stop, b.step) for a, b in zip(own, index, strict=True)))
            if common:
                array[inside(common, box)] = tensor.read(inside(common, part))
        return np.ascontiguousarray(array[tuple(slice(None, None, one.step) for one in index)])


def open_weights(path: str | Path, config: ModelConfig) -> WeightSource:
    """Find and check the weights of a model; nothing is loaded.

    path: as in `index_weights`, with Hugging Face or MindFormers names.
    Raises `UserError` when a weight is missing, has another shape or a type that is not float, or when the files hold
    layers, biases or a head that the configuration does not have. Other tensors are listed in the log.
    """
    path = Path(path)
    stored = index_weights(path)
    table = parameter_table(config)
    found = _tensors_in_files(path, config, stored)
    parts: dict[str, dict[Box, StoredTensor]] = {spec.name: {} for spec in table}
    for name, tensors in found.items():
        for tensor in tensors:
            held = stored[tensor.name]
            held.check(tensor.shape)
            parts[name][tensor.box] = replace(held, shape=box_shape(tensor.box), view=tensor.view)
    unused = stored.keys() - {tensor.name for tensors in found.values() for tensor in tensors}
    _check_unused(config, stored, found, unused)
    note_unused(path, unused)
    return WeightSource(path, {spec.name: spec.shape for spec in table}, parts)


def open_full(path: Path, model: ModelConfig | None) -> WeightSource:
    """Open uncut weights; if `model` is given, as `open_weights` does."""
    return open_weights(path, model) if model else _whole(path, _floating(path, {0: index_weights(path)})[0])


def _whole(path: Path, tensors: Tensors) -> WeightSource:
    return WeightSource.of(path, full_layout({name: tensor.shape for name, tensor in tensors.items()}), [tensors])


def open_sharded(path: Path, layout: Layout | Strategy) -> WeightSource:
    """Open weights in folders `rank_0`, `rank_1`, ..., under our names.

    Raises `UserError` unless the folder has the layout's ranks, parameters and shapes, and no weights of other models.
    """
    found = rank_folders(path)
    missing = [rank for rank in layout.ranks if rank not in found]
    if missing or len(found) > layout.size:
        state = f"has no folder rank_{missing[0]}" if missing else f"holds rank_{max(found)}"
        alone = "" if found else " (weights that are not cut need no layout)"
        problem = f"{path}: {state}, and the layout is one of {layout.size} ranks"
        raise UserError(f"{problem}; give the folder with all ranks{alone}.")
    ranks = {rank: index_weights(found[rank]) for rank in layout.ranks}
    if isinstance(layout, Strategy):
        ranks = _floating(path, ranks)
        layout = layout.layout(_full_shapes(layout, ranks), str(path))
    for rank, tensors in ranks.items():
        _check_rank(found[rank], layout, rank, tensors)
    unused = {name for tensors in ranks.values() for name in tensors if name not in layout.placements}
    if foreign := sorted(filter(is_model_weight, unused)):
        raise UserError(f"{path}: holds {foreign[0]}, which the layout does not know; {_ADVICE}.")
    note_unused(path, unused)
    return WeightSource.of(path, layout, ranks)


def rank_folders(path: Path) -> dict[int, Path]:
    """Find each rank's folder `rank_R`; empty when `path` is no folder."""
    if not path.is_dir():
        return {}
    found = {folder: _RANK_FOLDER.fullmatch(folder.name) for folder in path.iterdir() if folder.is_dir()}
    return {int(match[1]): folder for folder, match in found.items() if match}


def _full_shapes(strategy: Strategy, ranks: Mapping[int, Tensors]) -> dict[str, Shape]:
    """Compute each parameter's full shape from the first stored part."""
    shapes: dict[str, Shape] = {}
    for rank, tensors in ranks.items():
        for name, tensor in tensors.items():
            if name in shapes:
                continue
            sharding = strategy.shardings.get(name, {}).get(rank // strategy.stage_ranks)
            if sharding is not None and len(sharding.parts) == len(tensor.shape):
                shapes[name] = tuple(size * parts for size, parts in zip(tensor.shape, sharding.parts, strict=True))
    return {name: shapes[name] for name in strategy.shardings if name in shapes}


def _check_rank(folder: Path, layout: Layout, rank: int, tensors: Tensors) -> None:
    held = dict(layout.shards(rank))
    lacking = [name for name in held if name not in tensors]
    if lacking:
        raise UserError(f"{folder}: lacks {some(lacking)} that the layout puts on rank {rank}; {_ADVICE}.")
    for name, part in held.items():
        tensors[name].check(sliced_shape(part))


def _floating(path: Path, ranks: Mapping[int, Tensors]) -> dict[int, Tensors]:
    """Drop the counters (`global_step`, ...) that training stores with the weights."""
    dropped = {name for tensors in ranks.values() for name, tensor in tensors.items() if tensor.dtype not in STORAGE}
    note_unused(path, dropped)
    return {
        rank: {name: tensor for name, tensor in tensors.items() if name not in dropped}
        for rank, tensors in ranks.items()
    }


def index_weights(path: Path) -> dict[str, StoredTensor]:
    """Index all tensors of a path by name, from headers alone.

    A path is a `.safetensors` or `.ckpt` file, or a folder, of which the first of these is taken: `model.safetensors`,
    a sharded checkpoint with its index, any `.safetensors` files with distinct tensors, one `.ckpt`, or one `rank_*`
    folder of these. Hidden files (unfinished writing) are ignored.
    """
    refuse_verl_shards(path)
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
    weight_map = read_weight_map(index_file)
    shards = {}
    for shard in sorted(set(weight_map.values())):
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


def fingerprint(table: Iterable[ParameterSpec], read: Callable[[str, Slices], np.ndarray]) -> str:
    """Compute the SHA-256 of a model's names, shapes and a sample of its numbers.

    The sample is every n-th row of each tensor, at least 16 rows and fewer than 32 (all rows if there are no more),
    because reading the whole of a large file at each start would take longer than the rest of the start. Numbers are
    taken as float32 under Hugging Face's names, so that a model has one fingerprint in any file format, sharding, or
    dtype that holds it exactly. A change of only a few rows can go unnoticed; training changes all of them. table:
    without adapters. read: returns the part of a parameter, by name, that the slices select, float32.
    """
    digest = hashlib.sha256()
    for spec in table:
        for tensor in spec.hf_tensors:
            digest.update(json.dumps([tensor.name, list(tensor.shape)]).encode() + b"\n")
            index = list(slices_of(tensor.box))
            rows = len(spec.shape) - len(tensor.shape)
            step = max(1, tensor.shape[0] // _SAMPLED_ROWS)
            index[rows] = slice(*tensor.box[rows], step)
            digest.update(np.ascontiguousarray(read(spec.name, tuple(index)), "<f4").data)
    return digest.hexdigest()


def common_dtype(dtypes: Iterable[StoredDtype]) -> StoredDtype:
    """Find the narrowest dtype that holds the numbers of all dtypes exactly."""
    (first, *others) = set(dtypes)
    return "float32" if others else first


def note_unused(path: Path, names: Collection[str]) -> None:
    """Log the tensors in files that are not weights of the model."""
    if names:
        shown = some(sorted(names), 5)
        _log.warning("%s: %d tensors are not part of the model and are not used: %s", path, len(names), shown)


def write_weights(
    path: Path,
    shapes: Mapping[str, Shape],
    arrays: Iterator[np.ndarray],
    dtype: StoredDtype | Mapping[str, StoredDtype],
) -> None:
    """Write weights into a `.ckpt` or `.safetensors` file, as `write_safetensors` does."""
    if path.suffix == ".ckpt":
        write_ckpt(path, zip(shapes, arrays, strict=True), dtype)
    else:
        write_safetensors(path, list(shapes.items()), arrays, dtype, {"format": "ms"})


def _tensors_in_files(path: Path, config: ModelConfig, stored: Tensors) -> Mapping[str, tuple[HfTensor, ...]]:
    """Map our names to the files' tensors, in one of the naming schemes."""
    table = parameter_table(config)
    theirs = {spec.name: spec.hf_tensors for spec in table}
    ours = {spec.name: (spec.as_tensor(spec.name),) for spec in table}
    joint = {spec.name: spec.joint or spec.hf_tensors for spec in table}
    mcore = {spec.name: (mcore_tensor(spec, config) or spec.as_tensor(spec.name),) for spec in table}

    def absent(tensors: Mapping[str, tuple[HfTensor, ...]]) -> list[str]:
        names = (tensor.name for several in tensors.values() for tensor in several)
        return [name for name in dict.fromkeys(names) if name not in stored]

    found = min((theirs, ours, joint, mcore), key=lambda tensors: len(absent(tensors)))
    missing = absent(found)
    if not missing:
        return found
    if not any(tensor.name in stored for several in found.values() for tensor in several):
        example = f" (it begins with {min(stored)})" if stored else ""
        raise UserError(f"{path}: holds no weight of the model under a Hugging Face or MindFormers name{example}.")
    if missing == [HEAD]:
        hint = "set tie_word_embeddings to true if the model's head is its embedding"
    elif has_fused_projections(stored):
        hint = "the file was written with qkv_concat: True; write it with qkv_concat: False"
    else:
        hint = "give the weights and the configuration of one model"
    verb = "are" if len(missing) > 1 else "is"
    raise UserError(f"{path}: the weight {some(missing)} {verb} missing; {hint}.")


def _check_unused(
    config: ModelConfig, stored: Tensors, found: Mapping[str, tuple[HfTensor, ...]], unused: Collection[str]
) -> None:
    for name in sorted(unused):
        if is_layer_weight(name):
            raise UserError(
                f"{stored[name].file}: holds {name}, and the model's configuration ({config.family}, "
                f"{config.num_layers} layers) has no such weight; give the weights and the configuration of one model."
            )
    if HEAD in unused and not _equal(stored[HEAD], stored[found[EMBEDDING][0].name]):
        raise UserError(f"{stored[HEAD].file}: {HEAD} differs from the embedding; drop tie_word_embeddings: true.")


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    rows = max(1, _BLOCK_ELEMENTS // max(1, first.shape[1]))
    return all(
        np.array_equal(first.read((slice(start, start + rows),)), second.read((slice(start, start + rows),)))
        for start in range(0, first.shape[0], rows)
    )
