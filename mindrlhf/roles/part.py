"""One rank's part of a model: shard, process groups, parameters, updater, files."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf import backend
from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.backend.comm.graph_collectives import ExpertParallel, TensorParallel
from mindrlhf.backend.operators import Operators
from mindrlhf.checkpoint.adapted import split_adapter
from mindrlhf.checkpoint.finite import first_not_finite, spoiled
from mindrlhf.checkpoint.hf import generation_defaults, save_hf
from mindrlhf.checkpoint.model_card import adapter_card
from mindrlhf.checkpoint.peft import write_adapter
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.checkpoint.tokenizer import stopping_config
from mindrlhf.checkpoint.weights import Weights, hf_folder
from mindrlhf.configs.grpo import GRPOSettings, OptimizerSettings, TrainSettings
from mindrlhf.configs.lora import LoraSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.configs.sft import SFTSettings
from mindrlhf.data.tokenizer import Tokenizer
from mindrlhf.errors import UserError
from mindrlhf.files.naming import ADAPTER_FOLDER
from mindrlhf.memory.residency import BLOCK_NUMBERS, Residency
from mindrlhf.model_roles import Role, RoleModel
from mindrlhf.models.axes import DATA_AXES, EXPERT, PIPELINE, TENSOR
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.expert_layers import BALANCE
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.initialize import build_parameters
from mindrlhf.models.parameters import ParameterSpec, kept_rows, parameter_table
from mindrlhf.models.vision.batch import RowInputs
from mindrlhf.models.vision.fixed_tower import FixedTower, KnownRows, unread_rows
from mindrlhf.parallel.data_parallel import DataParallel
from mindrlhf.parallel.gradients import ReduceGradients
from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.partition import Partition
from mindrlhf.parallel.pipeline import PipelineAxis
from mindrlhf.reshard.online import OnlineReshard, gather_full
from mindrlhf.reshard.plan import plan
from mindrlhf.roles.blocks import Workspace, collect_in_blocks, keep_blocks, open_blocks
from mindrlhf.training.moments import Place
from mindrlhf.training.objective import Objective
from mindrlhf.training.optimizer import AdamW, ReplicaShare, ShardedNorm
from mindrlhf.training.scoring import Scorer
from mindrlhf.training.updater import Updater

Parameters = dict[str, Parameter]
Arrays = dict[str, tuple[Layout, Parameters]]
MemoryGroup = tuple[str, list[Parameter], bool]


@dataclass(frozen=True)
class Opening:
    """Inputs from which the parts of a run's roles are opened.

    yamls: model YAML of each layout. roles: model of each role. max_positions: of the longest sequence. checkpoint: of
    a run that is resumed. workspace: buffers of gathered weights. known_rows: of images, unless the policy has a vision
    tower that trains or none. zeros: see `weights`.
    """

    config: GRPOSettings | SFTSettings
    yamls: Mapping[str, ModelYaml]
    roles: Mapping[str, RoleModel]
    collectives: Collectives
    max_positions: int
    checkpoint: Checkpoint | None = None
    workspace: Workspace = field(default_factory=Workspace)
    known_rows: KnownRows | None = None
    zeros: bool = False

    def weights(self, role: str, model: ModelConfig | None = None, adapter: str | None = None) -> Weights:
        """Return the origin of a role's weights; with `zeros` they are all zero.

        model: by default the role's. adapter: see `Weights`.
        """
        own = self.roles[role]
        return Weights(own.path, model or own.model, self.config.seed, adapter, self.zeros)


class ModelPart:
    """The part of a model that this rank holds under one model YAML.

    All ranks of the YAML's mesh, and no others, make their parts at the same time and in the same order. `load` or
    `hold` sets the parameters. partition: the shard. data_parallel, shards, spread, pipeline: this rank's place on each
    axis. micro_batches: the fewest in an update, to keep the stages of a pipeline busy. max_positions: of the longest
    sequence. known_rows: of images, if nothing changes the vision tower, which is outside of the decoders then, unless
    its weights are gathered. Raises `UserError` if the layout does not divide the model.
    """

    role: Role
    what = "model"  # for messages
    replays = records = False  # the routing of experts, see `Decoder`
    scorer: Scorer | None = None
    updater: Updater | None = None  # only of a part that is trained

    def __init__(
        self,
        yaml: ModelYaml,
        model: ModelConfig,
        collectives: Collectives,
        max_positions: int,
        workspace: Workspace | None = None,
        known_rows: KnownRows | None = None,
    ):
        rank = collectives.world.rank
        self.partition = Partition.of_yaml(yaml, model, rank)
        mesh = self.partition.mesh
        self.yaml = yaml
        self.collectives = collectives.over(mesh.ranks)
        self._max_positions = max_positions
        self._known_rows = known_rows
        self._image_rows: RowInputs | None = None
        self.data_parallel = DataParallel(collectives, mesh.group(rank, *DATA_AXES))
        self.shards = TensorParallel(collectives, mesh.group(rank, TENSOR), sequence=self.partition.sequence)
        self.spread = ExpertParallel(collectives, mesh.group(rank, EXPERT))
        self.pipeline = PipelineAxis(collectives, mesh.group(rank, PIPELINE))
        self.micro_batches = yaml.parallel.micro_batch_num if mesh.pp > 1 else 1
        self.parameters: Parameters = {}
        self._workspace = workspace or Workspace()
        self._gathered_gradients: list[Parameter] = []

    def load(self, read: Callable[[ParameterSpec], np.ndarray]) -> None:
        """Build this rank's parameters with `read`, and their decoder."""
        self.hold(build_parameters(self.partition.specs, read))

    def hold(self, parameters: Parameters) -> None:
        """Set parameters by name and build the decoder."""
        self.parameters = parameters
        if self.partition.gathered:
            blocks = open_blocks(self.partition, self.collectives, parameters, self._workspace, self._block_decoder)
            self.decoder = blocks[-1].decoder
            self.decoder.blocks = blocks
            return
        if self._known_rows:
            self._image_rows = self._open_image_rows(self._known_rows)
        self.decoder = self._first_decoder()

    def _first_decoder(self) -> Decoder:
        """Build the decoder of `hold`, over this part's parameters."""
        return self._decoder(self.yaml.recomputes)

    def _open_image_rows(self, known: KnownRows) -> RowInputs:
        """Open the vision tower outside of the decoders, on the first stage."""
        part = self.partition
        if part.coordinates.pp > 0:
            return unread_rows(part.model)
        dtype = self.yaml.model.compute_dtype
        operators = self.yaml.context.device.operators(dtype)
        return FixedTower(part.model, self.parameters, operators, dtype, known).inputs

    def decoder_for_updates(self) -> Decoder:
        """Return the decoder for updates, over the same parameters.

        It is a separate decoder if adapters have dropout, and one of blocks if composed layers are computed again.
        """
        drops = self.partition.model.dropout > 0
        if self.yaml.recomputes and (drops or self.decoder.composed):
            blocks = keep_blocks(self.partition, self.parameters, self._block_decoder)
            last = blocks[-1].decoder
            last.blocks = blocks
            return last
        return self._decoder(for_updates=True) if drops else self.decoder

    def _decoder(
        self,
        recompute: bool = False,
        for_updates: bool = False,
        operators: Operators | None = None,
        packed: Parameters | None = None,
        records: bool = False,
        parameters: Parameters | None = None,
        layers: range | None = None,
        place: tuple[int, int] | None = None,
    ) -> Decoder:
        """Build a decoder; by default of this stage's layers, over this part's parameters.

        place: number of its stage, and of all stages.
        """
        part = self.partition
        yaml = self.yaml
        stage, stages = place or (part.coordinates.pp, part.mesh.pp)
        return Decoder(
            part.model,
            self.parameters if parameters is None else parameters,
            operators or yaml.context.device.operators(yaml.model.compute_dtype),
            self._max_positions,
            shards=self.shards,
            layers=part.layers if layers is None else layers,
            is_first=stage == 0,
            is_last=stage == stages - 1,
            recompute=recompute,
            for_updates=for_updates,
            packed=packed,
            replays=self.replays,
            records=records or self.records,
            spread=self.spread,
            image_rows=self._image_rows,
        )

    def _block_decoder(self, parameters: Parameters, layers: range, number: int, count: int) -> Decoder:
        """Build the decoder of one block, over its parameters."""
        return self._decoder(parameters=parameters, layers=layers, place=(number, count), for_updates=True)

    def open_updater(
        self,
        head: nn.Cell,
        objective: Objective,
        settings: OptimizerSettings,
        train: TrainSettings,
        in_blocks: bool = False,
        seed: int = 0,
    ) -> Updater:
        """Open an updater that minimises an objective over the parameters that train.

        head: see `training.graphs`, over the part's decoder for updates. in_blocks: update in blocks, so that moments
        can be swapped during an update. seed: see `Updater` and `AdamW`. train.load_balancing_coef adds its term to the
        objective.
        """
        part = self.partition
        if train.load_balancing_coef:
            objective = replace(objective, terms=(*objective.terms, (BALANCE, train.load_balancing_coef)))
        counted = [part.counts(spec) for spec in part.trained]
        optimizer = AdamW(
            settings,
            [self.parameters[spec.name] for spec in part.trained],
            part.trained,
            ShardedNorm(counted, self._sum_over_copy) if len(part.copy) > 1 else None,
            self._replica_share() if part.shared_optimizer else None,
            BLOCK_NUMBERS if in_blocks else None,
            self.decoder.operators,
            self._places(),
            seed,
        )
        buckets = self.yaml.parallel.gradient_aggregation_group
        reduce = None
        kept = {spec.name: own for spec, own in zip(part.trained, optimizer.gradients, strict=True)}
        if part.gathered:
            self._gathered_gradients = collect_in_blocks(self.decoder.blocks, part, self.collectives, kept, buckets)
        else:
            for block in head.decoder.blocks:
                block.add_to(kept, self.parameters)
            if groups := part.gradient_groups(part.trained):
                reduce = ReduceGradients(optimizer.gradients, groups, self.collectives, buckets)
        self.updater = Updater(head, objective, optimizer, train, reduce, self.pipeline, self.micro_batches, seed)
        return self.updater

    def _places(self) -> list[Place]:
        """List the places of the rows that this rank updates."""
        layout = self.partition.optimizer_layout
        trained = self.partition.trained
        return [Place(spec.name, layout.slices(self.partition.rank, spec.name), spec.shape) for spec in trained]

    def _sum_over_copy(self, number: float) -> float:
        return float(self.collectives.all_reduce_sum(np.array([number], np.float64), self.partition.copy)[0])

    def _replica_share(self) -> ReplicaShare:
        """Select the rows that this data-parallel replica updates for all."""
        part = self.partition
        updated = {}
        rows = []
        for spec in part.trained:
            parameter = self.parameters[spec.name]
            own = part.updated_rows(spec)
            rows.append(own)
            updated[spec.name] = parameter
            if own.stop - own.start < parameter.shape[0]:
                values = np.ascontiguousarray(backend.read(parameter)[own])
                updated[spec.name] = Parameter(Tensor(values), name=f"share.{spec.name}", requires_grad=False)
        moves = plan(part.optimizer_layout, part.trained_layout)
        reshard = OnlineReshard(moves, self.collectives, updated, self.parameters)
        return ReplicaShare(list(updated.values()), rows, reshard.run)

    def own(self) -> list[Parameter]:
        """List the parameters that belong to no other part."""
        return list(self.parameters.values())

    def join(self, policy: "ModelPart") -> None:
        """Complete a part that uses the policy's weights, once all parts are open."""

    def open_session(self) -> None:
        """Prepare the weights for a session of an engine."""

    def memory_groups(self) -> Iterator[MemoryGroup]:
        """Yield (group, parameters, True if all are zero); groups as in `memory.residency`."""
        apart = self.updater.optimizer.own_rows if self.updater else []
        yield self.role.weights[0], [*self.own(), *apart], False
        yield from self.optimizer_groups()

    def arrays(self) -> Arrays:
        """Return kind -> (layout, parameters) of everything that training changes, for checkpoints."""
        return {**self.kept_arrays(), **self.moment_arrays()} if self.updater else {}

    def counters(self) -> dict[str, Any]:
        """Return name -> object with `state_dict` and `load_state_dict`, for checkpoints."""
        return {self.role.training.counter: self.updater.optimizer} if self.updater else {}

    def register(self, residency: Residency) -> None:
        """Let the parameters leave memory in phases that do not need them."""
        self._workspace.register(residency)
        for group, parameters, zeros in self.memory_groups():
            residency.add(group, parameters, zeros)
        if self.updater:
            moments = self.role.training.moments
            self.updater.optimizer.before_block = lambda number: residency.use(f"{moments}.{number}")

    def optimizer_groups(self) -> Iterator[MemoryGroup]:
        """Yield the optimizer's groups, if the part is trained."""
        if not self.updater:
            return
        training = self.role.training
        optimizer = self.updater.optimizer
        yield training.gradients, [*optimizer.gradients, *self._gathered_gradients], True
        for number, block in enumerate(optimizer.blocks):
            moments = [array for i in block for array in optimizer.moments.arrays(i)]
            yield f"{training.moments}.{number}", moments, True

    def kept_arrays(self) -> Arrays:
        """Return the parameters that checkpoints hold as `arrays` does."""
        shard = self.partition
        kept = {spec.name for spec in kept_rows(shard.model)}
        parameters = {name: parameter for name, parameter in self.parameters.items() if name in kept}
        return {self.role.checkpoint: (shard.kept_layout, parameters)}

    def moment_arrays(self) -> Arrays:
        """Return the optimizer's moments as `arrays` does."""
        layout = self.partition.optimizer_layout
        names = [spec.name for spec in self.partition.trained]
        optimizer = self.updater.optimizer
        prefix = self.role.training.moment_prefix
        named = zip(("exp_avg", "exp_avg_sq"), optimizer.moments.named(names), strict=True)
        return {f"{prefix}{kind}": (layout, moments) for kind, moments in named}

    def save_hf(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        first: Weights | None = None,
        card: Mapping[str, bytes] | None = None,
        lora: LoraSettings | None = None,
    ) -> None:
        """Write the whole model as an HF directory, one parameter at a time.

        All ranks take part.
        first: the initial weights, whose sampling defaults are copied; the base of adapters. card: files of the model
        card. lora: settings of adapters, which are written to `hf_adapter` next to the directory, merged, or both.
        Raises `UserError` on all ranks if a weight is not finite; the folder keeps its content then.
        """
        part = self.partition
        weights = backend.read_all(self.parameters)
        broken = first_not_finite(weights, part.layout.placements, self.collectives.all_reduce_max)
        if broken:
            raise UserError(f"{directory}: {spoiled(self.what, broken)}.")
        merges = part.model.adapter is None or lora.save != "adapter"
        layout = part.layout if merges else part.trained_layout
        gathered = gather_full(layout, self.collectives, self.parameters)
        if not self.collectives.is_first:
            deque(gathered, 0)
            return
        table = {spec.name: spec for spec in parameter_table(part.model)}
        arrays: dict[str, np.ndarray] = {}
        tensors = split_adapter(((table[name], array) for name, array in gathered), arrays)
        if merges:
            config = stopping_config(tokenizer, part.model.base)
            generation = generation_defaults(first and first.path and hf_folder(first.path))
            save_hf(directory, config, tensors, tokenizer=tokenizer, replace=True, generation=generation, card=card)
            print(f"the {self.what} is in {directory}", flush=True)
        else:
            deque(tensors, 0)
        if arrays and lora.save != "merged":
            folder = directory.with_name(ADAPTER_FOLDER)
            own = adapter_card(card or {})
            in_memory = FAMILIES[part.model.family].in_memory
            write_adapter(folder, part.model.adapter, arrays, first.base(part), own, True, in_memory)
            print(f"the adapter of the {self.what} is in {folder}", flush=True)


class RolePart(ModelPart):
    """Part of the model of a role, in the role's layout."""

    def __init__(self, opening: Opening):
        model = opening.roles[self.role.name].model
        yaml = opening.yamls[self.role.layout_in(opening.yamls)]
        known = opening.known_rows if self.role.keeps_tower(model, opening.config) else None
        super().__init__(yaml, model, opening.collectives, opening.max_positions, opening.workspace, known)
