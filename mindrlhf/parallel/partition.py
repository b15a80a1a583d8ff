"""One rank's part of a model, and its gradient groups. Pure Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.models.axes import AXES, COPY_AXES, DATA_AXES, EXPERT, MODEL_AXES, PIPELINE, TENSOR
from mindrlhf.models.parameters import ParameterSpec, kept_rows, parameter_table
from mindrlhf.parallel.layout import Layout, Shape, Slices, model_layout, replica_sharded, split_layers, yaml_layout
from mindrlhf.parallel.mesh import Coordinates, Mesh

Group = tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """Part of the model on `rank`.

    mesh, layout: the ranks and all their shards. layers: layers of this rank's pipeline stage. sequence: activations
    outside of the parallel regions are split by rows (`use_seq_parallel`). shared_optimizer: each data-parallel replica
    keeps optimizer state for its shard of the parameters, and updates only this shard (`enable_parallel_optimizer`;
    Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1). gathered: the layout in which graphs compute, if ranks keep
    less, because replicas share weights and gradients too (`optimizer_level: level3`; section 5.3 there).
    """

    model: ModelConfig
    mesh: Mesh
    layout: Layout
    layers: range
    rank: int
    sequence: bool = False
    shared_optimizer: bool = False
    gathered: Layout | None = None

    @classmethod
    def of_yaml(cls, yaml: ModelYaml, model: ModelConfig, rank: int) -> "Partition | None":
        """Compute the part of `rank`; None on a rank outside of the mesh."""
        return next((part for part in cls.every_rank(yaml, model) if part.rank == rank), None)

    @classmethod
    def every_rank(cls, yaml: ModelYaml, model: ModelConfig) -> list["Partition"]:
        """Compute the parts of all ranks of the mesh, in their order."""
        mesh = Mesh.of_yaml(yaml)
        parallel = yaml.parallel
        layout = yaml_layout(yaml, model)
        layers = split_layers(model.num_layers, mesh.pp, yaml.model.offset)
        gathered = layout if parallel.shards_weights else None
        shared = parallel.shards_optimizer and not gathered
        kept = replica_sharded(layout, mesh) if gathered else layout
        ranks = ((rank, layers[mesh.coordinates(rank).pp]) for rank in mesh.ranks)
        given = parallel.use_seq_parallel, shared, gathered
        return [cls(model, mesh, kept, held, rank, *given) for rank, held in ranks]

    @classmethod
    def whole(cls, model: ModelConfig, ranks: Sequence[int]) -> list["Partition"]:
        """Compute the parts of a model that is whole on each rank."""
        mesh = Mesh(dp=len(ranks), ranks=tuple(ranks))
        layout = model_layout(model, mesh)
        return [cls(model, mesh, layout, range(model.num_layers), rank) for rank in ranks]

    @property
    def first_of_replica(self) -> bool:
        """True on the first of all ranks that have the same data."""
        return all(getattr(self.coordinates, axis) == 0 for axis in MODEL_AXES)

    @property
    def coordinates(self) -> Coordinates:
        return self.mesh.coordinates(self.rank)

    @cached_property
    def specs(self) -> list[ParameterSpec]:
        """Parameter table rows with a part on this rank, in table order."""
        return [spec for spec in parameter_table(self.model) if self.slices(spec) is not None]

    @cached_property
    def trained(self) -> list[ParameterSpec]:
        """Rows of `specs` that train, in table order."""
        return [spec for spec in self.specs if spec.trains]

    @cached_property
    def trained_layout(self) -> Layout:
        """Layout of the parameters that train."""
        return self.layout.only(spec.name for spec in parameter_table(self.model) if spec.trains)

    @cached_property
    def kept_layout(self) -> Layout:
        """Layout of the parameters that training checkpoints hold."""
        return self.layout.only(spec.name for spec in kept_rows(self.model))

    def slices(self, spec: ParameterSpec, rank: int | None = None) -> Slices | None:
        """Compute the part of a parameter on a rank; this rank by default."""
        return self.layout.slices(self.rank if rank is None else rank, spec.name)

    def shape(self, spec: ParameterSpec) -> Shape:
        return self.layout.shape(self.rank, spec.name)

    @property
    def copy(self) -> Group:
        """The ranks that keep one copy of the model together."""
        return self.mesh.group(self.rank, *(AXES if self.gathered else COPY_AXES))

    @cached_property
    def optimizer_layout(self) -> Layout:
        return replica_sharded(self.trained_layout, self.mesh) if self.shared_optimizer else self.trained_layout

    def updated_rows(self, spec: ParameterSpec) -> slice:
        """Rows of this rank's part of a parameter that this rank's optimizer updates."""
        own = self.slices(spec)[0]
        updated = self.optimizer_layout.slices(self.rank, spec.name)[0]
        return slice(updated.start - own.start, updated.stop - own.start)

    def twins(self, spec: ParameterSpec) -> Group:
        """List the ranks of this replica that hold the same part of a parameter."""
        replica = self.mesh.group(self.rank, *MODEL_AXES)
        return tuple(rank for rank in replica if self.slices(spec, rank) == self.slices(spec))

    def counts(self, spec: ParameterSpec) -> bool:
        """Test if this rank counts in sums over a copy of the model.

        The first rank with this part of a parameter does.
        """
        return next(rank for rank in self.copy if self.slices(spec, rank) == self.slices(spec)) == self.rank

    def gradient_group(self, spec: ParameterSpec) -> Group:
        """List the ranks that sum their gradients of a parameter.

        Every data-parallel replica has other data, and the same part unless its axis cuts the parameter. Twins in other
        stages (a tied embedding) use the parameter elsewhere. Twins in the same stage compute a part of its gradient if
        they use it inside a parallel region (shared key-value heads, norms of a layer, a tied embedding's head) or on
        their slice of the rows; otherwise each has the whole.
        """
        every = self.sequence or spec.inside
        own = self.coordinates.tp
        axes = set(DATA_AXES).difference(cut.axis for cut in spec.cuts)
        members = [rank for rank in self.twins(spec) if every or self.mesh.coordinates(rank).tp == own]
        return tuple(sorted(chain.from_iterable(self.mesh.group(rank, *axes) for rank in members)))

    def gradient_groups(self, specs: Sequence[ParameterSpec]) -> list[tuple[Group, list[int]]]:
        """List (ranks, indices into `specs`) of the gradients to sum.

        In this order no rank waits for another: within a stage before between stages, small groups before large ones.
        """
        groups: dict[Group, list[int]] = {}
        for index, spec in enumerate(specs):
            groups.setdefault(self.gradient_group(spec), []).append(index)

        def breadth(group: Group) -> Sequence[int]:
            places = [self.mesh.coordinates(rank) for rank in group]
            return tuple(len({getattr(place, axis) for place in places}) for axis in (PIPELINE, TENSOR, EXPERT))

        return sorted(((g, i) for g, i in groups.items() if len(g) > 1), key=lambda item: breadth(item[0]))
