"""Weights in files, whole or one file per rank, checked against their layout."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from mindrlhf.checkpoint.encoding import STORAGE, StoredDtype
from mindrlhf.checkpoint.stored_tensor import StoredTensor
from mindrlhf.checkpoint.weight_source import common_dtype, index_weights, note_unused, open_weights
from mindrlhf.configs.model import ModelConfig
from mindrlhf.errors import UserError
from mindrlhf.models.parameters import is_model_weight
from mindrlhf.parallel.layout import Layout, Shape, full_layout, sliced_shape
from mindrlhf.reshard.strategy import Strategy

_RANK_FOLDER = re.compile(r"rank_(\d+)")

_ADVICE = "give the layout that the checkpoint was written in"

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, eq=False)
class ShardedWeights:
    """Weights in the files of ranks: complete, of the right shapes, not loaded.

    path: as the user gave it. layout: the parts of each rank. ranks: for each rank, parameter -> its stored part.
    """

    path: Path
    layout: Layout
    ranks: Sequence[Tensors]

    @cached_property
    def dtypes(self) -> dict[str, StoredDtype]:
        """Narrowest dtype that holds each parameter exactly."""
        return {
            name: common_dtype(tensors[name].dtype for tensors in self.ranks if name in tensors)
            for name in self.layout.placements
        }

    def only(self, names: Sequence[str]) -> "ShardedWeights":
        """Select some parameters, in the given order."""
        return replace(self, layout=self.layout.only(names))


def open_full(path: Path, model: ModelConfig | None) -> ShardedWeights:
    """Open weights that are not cut: a file, or a folder of weight files.

    With `model` they are checked against it, and Hugging Face names become ours. Raises `UserError`.
    """
    tensors = open_weights(path, model).tensors if model else _floating(path, [index_weights(path)])[0]
    return ShardedWeights(path, full_layout({name: tensor.shape for name, tensor in tensors.items()}), [tensors])


def open_sharded(path: Path, layout: Layout | Strategy) -> ShardedWeights:
    """Open weights in folders `rank_0`, `rank_1`, ..., under our names.

    Raises `UserError` when a rank is missing or there are more than the layout has, when a rank lacks a parameter or
    holds it in another shape than the layout says, and when the files hold parameters of another model.
    """
    found = rank_folders(path)
    missing = [rank for rank in range(layout.size) if rank not in found]
    if missing or len(found) > layout.size:
        state = f"has no folder rank_{missing[0]}" if missing else f"holds rank_{max(found)}"
        alone = "" if found else " (weights that are not cut need no layout)"
        raise UserError(
            f"{path}: {state}, and the layout is one of {layout.size} ranks; give the folder with all ranks{alone}."
        )
    ranks = [index_weights(found[rank]) for rank in range(layout.size)]
    if isinstance(layout, Strategy):
        ranks = _floating(path, ranks)
        layout = layout.layout(_full_shapes(layout, ranks), str(path))
    for rank in range(layout.size):
        _check_rank(found[rank], layout, rank, ranks[rank])
    _check_unused(path, layout, ranks)
    return ShardedWeights(path, layout, ranks)


def rank_folders(path: Path) -> dict[int, Path]:
    """Find each rank's folder `rank_R`; empty when `path` is no folder."""
    if not path.is_dir():
        return {}
    found = {folder: _RANK_FOLDER.fullmatch(folder.name) for folder in path.iterdir() if folder.is_dir()}
    return {int(match[1]): folder for folder, match in found.items() if match}


def _full_shapes(strategy: Strategy, ranks: Sequence[Tensors]) -> dict[str, Shape]:
    """Compute each parameter's full shape from the first stored part."""
    shapes: dict[str, Shape] = {}
    for rank, tensors in enumerate(ranks):
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
        more = f" and {len(lacking) - 1} more weights" if len(lacking) > 1 else ""
        raise UserError(f"{folder}: lacks {lacking[0]}{more} that the layout puts on rank {rank}; {_ADVICE}.")
    for name, part in held.items():
        tensors[name].check(sliced_shape(part))


def _floating(path: Path, ranks: Sequence[Tensors]) -> list[Tensors]:
    """Drop the counters (`global_step`, ...) that training stores with the weights."""
    dropped = {name for tensors in ranks for name, tensor in tensors.items() if tensor.dtype not in STORAGE}
    note_unused(path, dropped)
    return [{name: tensor for name, tensor in tensors.items() if name not in dropped} for tensors in ranks]


def _check_unused(path: Path, layout: Layout, ranks: Sequence[Tensors]) -> None:
    """Refuse decoder weights that the layout does not know; ignore other tensors."""
    unused = {name for tensors in ranks for name in tensors if name not in layout.placements}
    foreign = sorted(name for name in unused if is_model_weight(name))
    if foreign:
        raise UserError(f"{path}: holds {foreign[0]}, which the layout does not know; {_ADVICE}.")
    note_unused(path, unused)
