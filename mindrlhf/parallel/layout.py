"""Layouts: the part of every parameter that each rank holds. Pure Python.

A stage's ranks form a grid, and a parameter's dimensions are cut along its axes. MindSpore describes layouts in the
same way, so that a layout can come from a model YAML or from a strategy file (`reshard/strategy.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod

from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_settings import GROUP
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.validate import check_layout
from mindrlhf.errors import UserError
from mindrlhf.models.axes import DATA_AXES, EXPERT, Axis
from mindrlhf.models.parameters import ParameterSpec, parameter_table
from mindrlhf.parallel.mesh import STAGE_AXES, Mesh

Shape = tuple[int, ...]
Slices = tuple[slice, ...]  # one for each dimension, both ends given; () for a scalar
Box = tuple[tuple[int, int], ...]  # slices that can be compared and used as keys: (start, stop) for each dimension


@dataclass(frozen=True)
class Sharding:
    """Partition of one tensor over the ranks of a stage.

    grid: lengths of the grid's axes; the stage's ranks are its points in row-major order (the "device matrix").
    cuts: for each dimension of the tensor the axes that cut it, the outermost first; () for an uncut dimension.
    """

    grid: tuple[int, ...]
    cuts: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(prod(self.grid[axis] for axis in axes) for axes in self.cuts)

    def slices(self, rank: int, shape: Shape) -> Slices:
        """Compute the part of a tensor of full `shape` that the stage's `rank` holds."""
        result = []
        for size, axes, parts in zip(shape, self.cuts, self.parts, strict=True):
            index = 0
            for axis in axes:
                index = index * self.grid[axis] + rank // prod(self.grid[axis + 1 :]) % self.grid[axis]
            step = size // parts
            result.append(slice(index * step, (index + 1) * step))
        return tuple(result)


@dataclass(frozen=True)
class Placement:
    """Full shape of a parameter, and its sharding in its pipeline stages."""

    shape: Shape
    shardings: Mapping[int, Sharding]


@dataclass(frozen=True)
class Layout:
    """Place of every parameter on `stages * stage_ranks` of the job's ranks.

    ranks: in ascending order, 0..size-1 by default; stage s is ranks[s*stage_ranks : (s+1)*stage_ranks].
    placements: name -> placement, in the order of the parameter table, the same on every rank.
    """

    stages: int
    stage_ranks: int
    placements: Mapping[str, Placement]
    ranks: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "ranks", self.ranks or tuple(range(self.size)))
        if len(self.ranks) != self.size:
            raise ValueError(f"a layout of {self.size} ranks is not one on {self.ranks}")
        for name, placement in self.placements.items():
            if not placement.shardings:
                raise ValueError(f"{name}: no stage holds it")
            for stage, sharding in placement.shardings.items():
                if not 0 <= stage < self.stages or prod(sharding.grid) != self.stage_ranks:
                    sizes = f"{self.stages} stages of {self.stage_ranks} ranks"
                    raise ValueError(f"{name}: {sharding.grid}, stage {stage}: not {sizes}")
                if any(size % parts for size, parts in zip(placement.shape, sharding.parts, strict=True)):
                    raise ValueError(f"{name}: shape {placement.shape} cannot be cut into {sharding.parts} parts")

    @property
    def size(self) -> int:
        return self.stages * self.stage_ranks

    @cached_property
    def writers(self) -> Mapping[int, Sequence[str]]:
        """Rank -> names of the parts that it writes, spread evenly over their holders."""
        written = dict.fromkeys(self.ranks, 0)
        names: dict[int, list[str]] = {rank: [] for rank in self.ranks}
        for name in self.placements:
            for part, ranks in self.holders(name).items():
                rank = min(ranks, key=lambda rank: (written[rank], rank))  # the holder with the least to write
                names[rank].append(name)
                written[rank] += prod(box_shape(part))
        return names

    @cached_property
    def _places(self) -> Mapping[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: placement.shape for name, placement in self.placements.items()}

    def only(self, names: Iterable[str]) -> "Layout":
        """Select some parameters, in the given order."""
        return replace(self, placements={name: self.placements[name] for name in names})

    def slices(self, rank: int, name: str) -> Slices | None:
        """Compute the part of a parameter that `rank` holds; None in other stages."""
        if rank not in self._places:
            raise ValueError(f"rank {rank} is outside of a layout of {self.size} ranks")
        stage, place = divmod(self._places[rank], self.stage_ranks)
        placement = self.placements[name]
        sharding = placement.shardings.get(stage)
        return None if sharding is None else sharding.slices(place, placement.shape)

    def shards(self, rank: int) -> Iterator[tuple[str, Slices]]:
        """List (name, part of the full parameter) for `rank`, in table order.

        A rank outside of the layout has none.
        """
        held = ((name, self.slices(rank, name)) for name in self.placements if rank in self._places)
        return ((name, part) for name, part in held if part is not None)

    def holders(self, name: str) -> dict[Box, list[int]]:
        """Find the ranks that hold each distinct part of a parameter."""
        found: dict[Box, list[int]] = {}
        for rank in self.ranks:
            if (part := self.slices(rank, name)) is not None:
                found.setdefault(box_of(part), []).append(rank)
        return found

    def shape(self, rank: int, name: str) -> Shape:
        """Shape of the part that `rank` holds; ValueError if it holds none."""
        held = self.slices(rank, name)
        if held is None:
            raise ValueError(f"rank {rank} holds no part of {name}")
        return sliced_shape(held)


def box_of(slices: Slices) -> Box:
    return tuple((part.start, part.stop) for part in slices)


def selected(index: Slices, shape: Shape) -> Box:
    """Compute the box that contains what an index selects."""
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def slices_of(box: Box) -> Slices:
    return tuple(slice(start, stop) for start, stop in box)


def box_shape(box: Box) -> Shape:
    return tuple(stop - start for start, stop in box)


def sliced_shape(slices: Slices) -> Shape:
    """Shape that slices with both ends select."""
    return box_shape(box_of(slices))


def overlap(first: Box, second: Box) -> Box | None:
    """Compute the common part of two boxes, or None."""
    box = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(first, second, strict=True))
    return box if all(start < stop for start, stop in box) else None


def inside(box: Box, part: Box) -> Slices:
    """Convert a box to the coordinates of the part that contains it."""
    return tuple(slice(b[0] - p[0], b[1] - p[0]) for b, p in zip(box, part, strict=True))


def full_layout(shapes: Mapping[str, Shape], rank: int = 0) -> Layout:
    """Layout with the whole model on one rank."""
    whole = {name: Placement(shape, {0: Sharding((1,), ((),) * len(shape))}) for name, shape in shapes.items()}
    return Layout(1, 1, whole, (rank,))


def model_layout(
    model: ModelConfig,
    mesh: Mesh,
    *,
    offset: int | tuple[int, ...] = 0,
    vocab_emb_dp: bool = True,
    where: str = f"{GROUP}.offset",
) -> Layout:
    """Compute the layout of a model on a mesh.

    With more ranks than key-value heads, neighbouring ranks hold the same head.
    offset: see `split_layers`; `where` is its name in messages. vocab_emb_dp: every tensor-parallel rank holds the
    whole embedding; otherwise it is cut by vocabulary. An untied head is always cut, so that no rank ever has all
    logits (MindFormers leaves it whole with vocab_emb_dp: its checkpoints are read with their strategy files).
    Raises ValueError if the mesh does not divide the model; `yaml_layout` explains this to the user.
    """
    heads = model.num_kv_heads
    tp = mesh.tp
    if model.num_heads % tp or (heads % tp and tp % heads):
        raise ValueError(f"{tp} tensor-parallel ranks do not share {model.num_heads} query and {heads} key-value heads")
    layers = split_layers(model.num_layers, mesh.pp, offset, where)
    placements = {
        spec.name: Placement(spec.shape, dict.fromkeys(_stages(spec, layers), _sharding(spec, mesh, vocab_emb_dp)))
        for spec in parameter_table(model)
    }
    return Layout(mesh.pp, mesh.size // mesh.pp, placements, mesh.ranks)


def replica_sharded(layout: Layout, mesh: Mesh) -> Layout:
    """Cut first dimensions over data-parallel ranks too, if they divide evenly.

    mesh: of the layout. Experts that are spread over some of these ranks are cut over the others.
    """
    replicas = [place for place, axis in enumerate(grid_axes(mesh)) if axis in DATA_AXES]

    def shared(sharding: Sharding, shape: Shape) -> Sharding:
        used = {axis for axes in sharding.cuts for axis in axes}
        further = (axis for axis in replicas if axis not in used)
        cut = Sharding(sharding.grid, ((*sharding.cuts[0], *further), *sharding.cuts[1:]))
        return cut if shape[0] % cut.parts[0] == 0 else sharding

    placements = {
        name: Placement(place.shape, {stage: shared(old, place.shape) for stage, old in place.shardings.items()})
        for name, place in layout.placements.items()
    }
    return replace(layout, placements=placements)


def grid_axes(mesh: Mesh) -> list[Axis]:
    """List the axes of a stage's grid.

    Without spread experts it has no axis of theirs.
    """
    return [axis for axis in STAGE_AXES if axis != EXPERT or mesh.ep > 1]


def yaml_layout(yaml: ModelYaml, model: ModelConfig) -> Layout:
    """Compute the layout that a model YAML asks for, or raise a UserError."""
    parallel = yaml.parallel
    check_layout(yaml, model, parallel.workers)
    mesh = Mesh.of_yaml(yaml)
    where = f"{yaml.path}: {GROUP}.offset"
    layout = model_layout(model, mesh, offset=yaml.model.offset, vocab_emb_dp=parallel.vocab_emb_dp, where=where)
    trained = [layout.placements[spec.name].shardings for spec in parameter_table(model) if spec.trains]
    idle = set(range(layout.stages)).difference(*trained)
    if idle:
        found = f"{yaml.path}: pipeline stage {min(idle)} has nothing that trains, and each stage must"
        right = "leave text out of train.freeze" if model.frozen else "give its layers adapters (lora.target_modules)"
        raise UserError(f"{found}; {right}, or set parallel_config.pipeline_stage to 1.")
    return layout


def split_layers(
    num_layers: int, stages: int, offset: int | tuple[int, ...] = 0, where: str = f"{GROUP}.offset"
) -> tuple[range, ...]:
    """Divide the decoder layers over the pipeline stages.

    Each stage has num_layers // stages layers plus its entry of `offset` (which may be negative), as in MindFormers'
    `LayerSetting`; only the first and the last stage may have no layer. 0 means that there is no remainder; with one
    stage the offset is ignored. where: the beginning of a `UserError`.
    """
    if stages == 1:
        return (range(num_layers),)
    base, rest = divmod(num_layers, stages)
    example = [1] * rest + [0] * (stages - rest)
    offsets = (0,) * stages if offset == 0 else offset
    counts = [] if isinstance(offsets, int) else [base + extra for extra in offsets]
    if len(counts) != stages or sum(counts) != num_layers or min(counts) < 0 or 0 in counts[1:-1]:
        shown = offset if isinstance(offset, int) else list(offset)
        raise UserError(
            f"{where} is {shown}, and {num_layers} layers on {stages} stages ask for a list of {stages} numbers with "
            f"the sum {rest}, like {example}, that leaves layers to every stage between the first and the last."
        )
    return tuple(range(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True))


def _sharding(spec: ParameterSpec, mesh: Mesh, vocab_emb_dp: bool) -> Sharding:
    """Compute a parameter's sharding; surplus ranks of an axis hold equal parts."""
    whole = spec.kind == "embedding" and vocab_emb_dp
    cuts = {} if whole else {cut.axis: cut for cut in spec.cuts}
    grid: list[int] = []
    axes: list[tuple[int, ...]] = [()] * len(spec.shape)
    for axis in grid_axes(mesh):
        length = mesh.lengths[axis]
        cut = cuts.get(axis)
        if cut is not None:
            axes[cut.dim] += (len(grid),)
        surplus = cut is not None and cut.parts is not None and length > cut.parts
        grid += [cut.parts, length // cut.parts] if surplus else [length]
    return Sharding(tuple(grid), tuple(axes))


def _stages(spec: ParameterSpec, layers: tuple[range, ...]) -> list[int]:
    last = len(layers) - 1
    ends = {"first": [0], "last": [last], "ends": [0, last]}
    return ends.get(spec.place) or [stage for stage, held in enumerate(layers) if spec.place in held]
