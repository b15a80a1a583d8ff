"""MindSpore's strategy files, which hold layouts: reading and writing.

A file is one protobuf message (`mindspore.train.node_strategy_pb2.ParallelStrategyMap`) about one pipeline stage. It
has no shapes. For each parameter it has a device matrix over the stage's ranks (`Sharding.grid`), a tensor map with the
axis that cuts each dimension (counted from the right, -1 for none), and the number of further cuts of the first
dimension by `enable_parallel_optimizer`. Jobs write one file per rank; `merge_pipeline_strategys` merges them into one,
whose parameter names begin with `STAGE-`. Not read: the JSON form; uneven cuts of an embedding (`param_split_shape`).
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from mindrlhf.errors import UserError
from mindrlhf.files.atomic import atomic_folder
from mindrlhf.files.text import reading, some
from mindrlhf.parallel.layout import Layout, Placement, Shape, Sharding

_MERGED_NAME = re.compile(r"(\d+)-(.+)")


@dataclass(frozen=True)
class Strategy:
    """Layout in one job's strategy files, without shapes.

    path: as the user gave it. shardings: parameter -> pipeline stage -> sharding over the stage's ranks.
    """

    path: Path
    stages: int
    stage_ranks: int
    shardings: Mapping[str, Mapping[int, Sharding]]

    @property
    def size(self) -> int:
        return self.stages * self.stage_ranks

    @property
    def ranks(self) -> range:
        return range(self.size)

    def layout(self, shapes: Mapping[str, Shape], what: str) -> Layout:
        """Compute the layout of parameters of these full shapes, named `what`, in their order.

        Raises `UserError` if the strategy is of another model: a parameter is missing on either side (except for
        optimizer state, which a strategy may list without the shapes having it), or a shape cannot be cut that way.
        """
        advice = "give the strategy and the weights of one model"
        unknown = [name for name in shapes if name not in self.shardings]
        if unknown:
            stages = " (of a job with pipeline stages, the folder of all its files)" if self.path.is_file() else ""
            raise UserError(f"{self.path}: says nothing of {some(unknown, 3)} of {what}; {advice}{stages}.")
        absent = sorted(parameters_only(self.shardings) - shapes.keys())
        if absent:
            raise UserError(f"{self.path}: is about {some(absent, 3)}, which {what} lacks; {advice}.")
        placements = {name: Placement(tuple(shape), self.shardings[name]) for name, shape in shapes.items()}
        for name, shape in shapes.items():
            for parts in (sharding.parts for sharding in self.shardings[name].values()):
                if len(shape) != len(parts) or any(size % count for size, count in zip(shape, parts, strict=True)):
                    cuts = f"cuts {name} into {list(parts)} parts, which does not fit its shape {list(shape)}"
                    raise UserError(f"{self.path}: {cuts} in {what}; {advice}.")
        return Layout(self.stages, self.stage_ranks, placements)


def parameters_only(names: Collection[str]) -> set[str]:
    """Drop the names of optimizer state (`adam_m.NAME` and similar)."""
    return {name for name in names if name.partition(".")[2] not in names}


def save_strategies(folder: str | Path, layout: Layout) -> list[Path]:
    """Write a layout as MindSpore's strategy files, one for each rank; returns their paths.

    An earlier folder of strategy files is replaced as a whole; a folder with any other file is refused.
    """
    folder = Path(folder)
    for path in folder.iterdir() if folder.is_dir() else ():
        if not re.fullmatch(r"ckpt_strategy_rank_\d+\.ckpt", path.name):
            raise UserError(f"{path}: is no strategy file, so its folder is not replaced; give another folder.")
    names = [f"ckpt_strategy_rank_{rank}.ckpt" for rank in layout.ranks]
    with atomic_folder(folder, replace=True) as temporary:
        contents = [_message(layout, stage).SerializeToString() for stage in range(layout.stages)]
        for place, name in enumerate(names):
            (temporary / name).write_bytes(contents[place // layout.stage_ranks])
    return [folder / name for name in names]


def read_strategy(path: str | Path) -> Strategy:
    """Read a merged or single-stage strategy file, or a folder of all ranks' files."""
    path = Path(path)
    shardings: dict[str, dict[int, Sharding]] = {}
    seen: set[bytes] = set()
    for file in _files(path):
        with reading(file):
            content = file.read_bytes()
        if content in seen:  # another rank of the same stage
            continue
        seen.add(content)
        for name, stage, sharding in _entries(file, content):
            if shardings.setdefault(name, {}).setdefault(stage, sharding) != sharding:
                problem = f"{file}: cuts {name} of pipeline stage {stage} in another way"
                raise UserError(f"{problem}; give the files of one job.")
    counts = {prod(each.grid) for stages in shardings.values() for each in stages.values()}
    if len(counts) != 1:
        raise UserError(f"{path}: its parameters lie on {sorted(counts)} ranks of a stage; give the files of one job.")
    found = sorted({stage for stages in shardings.values() for stage in stages})
    if found != list(range(len(found))):
        raise UserError(f"{path}: has the pipeline stages {found} only; give the folder with the files of all ranks.")
    return Strategy(path, len(found), counts.pop(), shardings)


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(file for file in path.glob("*.ckpt") if not file.name.startswith("."))
    if not files:
        state = "holds no strategy file (*.ckpt)" if path.is_dir() else "does not exist"
        raise UserError(f"{path}: {state}; give a strategy file, a folder of them, or a model YAML.")
    return files


def _entries(file: Path, content: bytes) -> Iterator[tuple[str, int, Sharding]]:
    """List (parameter, pipeline stage, sharding) of all entries of a file."""
    from google.protobuf.message import DecodeError
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap()
    try:
        message.ParseFromString(content)
    except (DecodeError, ValueError):  # the latter for names that are not UTF-8
        raise UserError(f"{file}: is no MindSpore strategy file, or damaged; get it again.") from None
    if not message.parallel_layout_item:
        raise UserError(f"{file}: holds no parameter's layout; give the strategy file of a parallel job.")
    operators = message.parallel_strategy_item
    own_stage = operators[0].parallel_strategys.stage if operators else 0
    for item in message.parallel_layout_item:
        merged = _MERGED_NAME.fullmatch(item.param_name)
        stage, name = (int(merged[1]), merged[2]) if merged else (own_stage, item.param_name)
        yield name, stage, _sharding(file, name, item.parallel_layouts)


def _sharding(file: Path, name: str, layout: Any) -> Sharding:
    grid = tuple(layout.dev_matrix[0].dim or (1,)) if layout.dev_matrix else ()
    maps = layout.tensor_map
    # A single map has one number for each dimension; several maps have the axes of one dimension each.
    dims = [[number] for number in maps[0].dim] if len(maps) == 1 else [list(each.dim) for each in maps]
    cuts = tuple(tuple(len(grid) - 1 - number for number in numbers if number != -1) for numbers in dims)
    axes = [axis for each in cuts for axis in each]
    known = bool(grid and maps) and all(0 < count < 1 << 20 for count in grid)
    if not known or not all(0 <= axis < len(grid) for axis in axes) or len(set(axes)) < len(axes):
        raise UserError(f"{file}: the tensor map of {name} does not fit its device matrix {list(grid)}; get it again.")
    whole = Sharding(grid, cuts)
    parts = layout.opt_weight_shard_size
    return _with_optimizer_shards(file, name, whole, parts) if parts else whole


def _with_optimizer_shards(file: Path, name: str, sharding: Sharding, parts: int) -> Sharding:
    """Cut the first dimension once more, along axes that cut nothing.

    parts: number of cuts; -1 for the number of replicas.
    As in MindSpore's `_construct_tensor_layout_for_opt_shard`: the last of these axes is used first; if a whole axis
    would make too many cuts, only its inner part is used.
    """
    grid, cuts = list(sharding.grid), list(sharding.cuts)
    free = [axis for axis in range(len(grid)) if not any(axis in axes for axes in cuts)]
    if parts == -1:
        parts = prod(grid[axis] for axis in free)
    chosen: list[int] = []
    while parts > 1 and free:
        axis = free.pop()
        if grid[axis] > parts and grid[axis] % parts == 0:
            grid[axis : axis + 1] = [grid[axis] // parts, parts]
            cuts = [tuple(each + (each > axis) for each in axes) for axes in cuts]
            chosen = [each + 1 for each in chosen]
            axis += 1
        if parts % grid[axis]:
            break
        parts //= grid[axis]
        chosen.insert(0, axis)
    if parts > 1 or not cuts:
        raise UserError(f"{file}: the optimizer shards of {name} do not fit its device matrix {list(sharding.grid)}.")
    return Sharding(tuple(grid), ((*cuts[0], *chosen), *cuts[1:]))


def _message(layout: Layout, stage: int) -> Any:
    from mindspore.train.node_strategy_pb2 import ParallelStrategyMap

    message = ParallelStrategyMap(current_stage=1)
    for name, placement in layout.placements.items():
        sharding = placement.shardings.get(stage)
        if sharding is None:
            continue
        # MindSpore's tools read the stage from the first operator's entry; here a parameter replaces its operator.
        operator = message.parallel_strategy_item.add(node_name=name)
        operator.parallel_strategys.stage = stage
        operator.parallel_strategys.parallel_strategy.add(dim=sharding.parts)
        entry = message.parallel_layout_item.add(param_name=name).parallel_layouts
        entry.dev_matrix.add(dim=sharding.grid)
        if any(len(axes) > 1 for axes in sharding.cuts):
            raise ValueError(f"{name}: a dimension that several axes cut cannot be written to a strategy file")
        last = len(sharding.grid) - 1
        entry.tensor_map.add(dim=[last - axes[0] if axes else -1 for axes in sharding.cuts])
        entry.param_split_shape.add()
        entry.indices_offset.add()
        entry.field = entry.opt_weight_shard_step = entry.opt_weight_shard_size = 0
    return message
