"""Memory of each rank of a job, from its settings alone. Pure Python.

Roles are counted as in a run (`swap/role_gb/*`, `swap/resident_gb/*`). Estimates are added to them: the activations of
graphs, and on CPU the process itself, its compiled graphs and its kernels' tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from mindrlhf import phases
from mindrlhf.backend.native.names import halves
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml, rounds_rollouts
from mindrlhf.memory import activations
from mindrlhf.memory.activations import Engine, Stage
from mindrlhf.memory.device_extra import device_extra, rank_groups
from mindrlhf.memory.graph_sizes import COMPOSED_GRAPHS, FUSED_GRAPHS, PROCESS, TOKENIZER_ROW
from mindrlhf.memory.part_bytes import (
    gathered_bytes,
    gradient_bytes,
    graph_layers,
    numbers_bytes,
    optimizer_bytes,
    packed_bytes,
    policy_bytes,
)
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.rank_plan import Pass, RankPlan
from mindrlhf.memory.residency import moving_roles
from mindrlhf.memory.reward_models import scoring_batches, scoring_yaml, verdict_engine
from mindrlhf.memory.tower_activations import TowerBatch
from mindrlhf.metrics.flops import GroupLengths
from mindrlhf.model_roles import GENERATOR, POLICY, REFERENCE, RoleModel, role_of
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import ParameterSpec, decoded_rows, tower_trains
from mindrlhf.models.routing import RoutingForm
from mindrlhf.parallel.layout import Layout, Shape
from mindrlhf.parallel.partition import Group, Partition
from mindrlhf.shapes import cache_positions, padded_prefix, pool_size, round_responses, slot_count
from mindrlhf.training.batch import MicroBatch, cut_alike
from mindrlhf.units import FLOAT32, GIB


@dataclass(frozen=True)
class Work:
    """Sizes of a job that determine its memory.

    roles: of the job. models: name -> rank -> part of the model, on the ranks that have one. fused: graphs have the
    operators of `backend.native`.
    """

    config: GRPOSettings
    roles: Mapping[str, RoleModel]
    train: ModelYaml
    infer: ModelYaml
    lengths: Lengths
    models: Mapping[str, Mapping[int, Partition]]
    fused: bool

    @classmethod
    def of(
        cls,
        config: GRPOSettings,
        roles: Mapping[str, RoleModel],
        train: ModelYaml,
        infer: ModelYaml,
        lengths: Lengths,
    ) -> "Work":
        """Compute the sizes; UserError if a layout does not divide a model."""
        model = roles[POLICY.name].model
        scoring = [part.rank for part in Partition.every_rank(infer, model) if part.first_of_replica]
        models = {}
        for name, one in roles.items():
            role = role_of(name)
            yaml = train if role.layout == "train" else infer
            parts = Partition.whole(one.model, scoring) if role.listed else Partition.every_rank(yaml, one.model)
            models[name] = {part.rank: part for part in parts}
        fused = not train.context.device.fused_problem() and FAMILIES[model.family].all_halves(model) <= halves()
        return cls(config, roles, train, infer, lengths, models, fused)

    @property
    def model(self) -> ModelConfig:
        """Architecture of the policy."""
        return self.roles["policy"].model

    def yaml(self, name: str) -> ModelYaml:
        """Model YAML of a model's graphs."""
        yaml = self.train if role_of(name).layout == "train" else self.infer
        settings = self.roles[name].settings
        return scoring_yaml(yaml, settings) if settings else yaml

    @property
    def trains(self) -> Mapping[int, Partition]:
        """Parts of the policy in training, by rank."""
        return self.models["policy"]

    @property
    def infers(self) -> Mapping[int, Partition]:
        """Parts of the policy in generation, by rank."""
        return self.models["generator"]

    @property
    def ranks(self) -> list[int]:
        """All ranks of the job."""
        return sorted({rank for parts in self.models.values() for rank in parts})

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of the trained parameters: in training and in generation."""
        train, infer = (next(iter(parts.values())) for parts in (self.trains, self.infers))
        return train.trained_layout, infer.trained_layout

    @property
    def packed(self) -> list[ParameterSpec]:
        """Rows of the weights that `rollout.weights` packs."""
        return [] if self.config.rollout.weights == "train" else decoded_rows(self.roles[GENERATOR.name].model)

    @property
    def group(self) -> GroupLengths:
        """Lengths of the longest prompt and its answers."""
        rollout = self.config.rollout
        images = self.lengths.pictures.grids
        return GroupLengths(self.lengths.prompt, [rollout.max_new_tokens], rollout.num_generations, images)

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Phases of a run, in order."""
        algorithm = self.config.algorithm
        trainer = self.config.trainer
        train, infer = self.layouts
        roles = {role_of(name).name for name in self.models}
        rounds = rounds_rollouts(self.train, self.infer, self.config.rollout.weights)
        scores_old = algorithm.scores_old_policy(self.model.dropout) or (rounds and algorithm.reads_policy)
        conditions = {
            POLICY.scoring.phase: scores_old,
            "sync_ref": REFERENCE.name in roles and algorithm.reference_sync_steps > 0,
            "reshard": train != infer or any(spec.trains for spec in self.packed),
            "testing": self.lengths.problems > 0,
            "save_checkpoint": trainer.save_freq is not None or trainer.save_best_metric is not None,
            "load_checkpoint": False,
        }
        return tuple(
            name for name, phase in phases.PHASES.items() if phase.groups and conditions.get(name, phase.role in roles)
        )

    @cached_property
    def passes(self) -> Sequence[Pass]:
        """Computations of a run's phases, in order."""
        return [
            Pass(phase, name, "generate" if one.verdict_tokens else kind)
            for phase in self.phases
            if (kind := phases.PHASES[phase].kind)
            for name, one in self.roles.items()
            if role_of(name).name == phases.PHASES[phase].role
        ]

    def passes_of(self, rank: int) -> list[Pass]:
        """List the computations of a rank."""
        return [one for one in self.passes if rank in self.models[one.model]]

    def groups(self, rank: int) -> set[Group]:
        """List the groups of several ranks that a rank is in."""
        return rank_groups(self.ranks, (self.trains, self.infers), rank)

    @property
    def communicator_bytes(self) -> int:
        """Most bytes that groups of ranks take in one of them, on a device."""
        return self.train.context.device.communicator_bytes() * max(len(self.groups(rank)) for rank in self.ranks)

    def rank_plans(self) -> list[RankPlan]:
        return [self.rank_plan(rank) for rank in self.ranks]

    def rank_plan(self, rank: int) -> RankPlan:
        """Plan the memory of `rank`.

        In host memory, activations come from a pool that never shrinks, so that its largest size in any phase counts. A
        device has one pool for activations and roles, which reuses the memory that swap has freed.
        """
        parts = group_parts(self, rank)
        device = self.train.context.device
        moving = moving_roles(self.config.memory.swap, device)
        held = {}
        for phase in self.phases:
            needed = phases.PHASES[phase]
            held[phase] = {
                role: max(sizes) if role in moving and role in needed.parts else sum(sizes)
                for role, sizes in parts.items()
                if role in needed.groups or role not in moving
            }
        pools = pool_bytes(self, rank)
        process = process_bytes(self, rank) if device.in_host_memory else 0
        stays = process + max(pools.values(), default=0)
        totals = {
            phase: sum(roles.values()) + (stays if process else pools.get(phase, 0)) for phase, roles in held.items()
        }
        extra = device_extra(device, self.groups(rank), max(totals.values()))
        totals = {phase: total + sum(extra.values()) for phase, total in totals.items()}
        peak = max(totals, key=lambda phase: (totals[phase], pools.get(phase, 0)))
        roles = {role: sum(sizes) for role, sizes in parts.items()}
        return RankPlan(rank, roles, held, pools, process, extra, totals, totals[peak], peak)

    def engines(self, phase: str, name: str = GENERATOR.name) -> list[Engine]:
        """List the engines in which a model generates on one rank.

        phase: `gen` or `testing`, or that of a judge that writes.
        """
        if verdicts := self.verdict_engines(name):
            return verdicts
        config = self.config
        ranks = self.infer.parallel.data_parallel
        sampling = config.rollout
        prompt = self.lengths.prompt
        packed = bool(self.packed)
        responses = round_responses(config, ranks)
        samples = (sampling.num_generations, 1)
        if phase == "testing":
            sampling = config.validation.completed(config.rollout)
            prompt = self.lengths.problem
            packed = False
            samples = (sampling.num_generations,)
            # If the ranks do not divide the held-out problems, the first ranks have one more.
            responses = (-(-self.lengths.problems // ranks) * sampling.num_generations,)
        bucket = config.train.length_bucket
        prefix = padded_prefix(prompt, bucket)
        positions = cache_positions(prompt, sampling.max_new_tokens, bucket)
        pairs = zip(responses, samples, strict=True)
        slots = [(slot_count(config.rollout.max_slots, count), each) for count, each in pairs if count]
        records = phase == "gen" and config.rollout.records_routing
        routing = RoutingForm.of(self.roles[name].model).width if records else 0
        return [Engine(pool_size(count, each), prefix, count, positions, packed, routing) for count, each in slots]

    def verdict_engines(self, name: str) -> list[Engine]:
        """List the engine of a judge that writes its verdicts; none of another model."""
        one = self.roles[name]
        return [verdict_engine(one.settings)] if one.verdict_tokens else []

    def micro_batches(self, kind: str, name: str = POLICY.name) -> Sequence[MicroBatch]:
        """Cut the longest groups for a model's pass of `kind` (score, update), largest first."""
        config = self.config
        if settings := self.roles[name].settings:
            groups = -(-config.data.prompts_per_step // len(self.models[name]))
            return scoring_batches(settings, config.rollout, groups, self.lengths.prompt)
        parallel = self.train.parallel
        groups = config.data.prompts_per_step // parallel.data_parallel
        least = 1
        if kind == "update":
            groups //= config.algorithm.updates_per_iteration
            least = parallel.micro_batch_num if parallel.pipeline_stage > 1 else 1
        rollout = config.rollout
        train = config.train
        return cut_alike(
            groups=groups,
            prompt=self.lengths.prompt,
            samples=rollout.num_generations,
            response=rollout.max_new_tokens,
            max_tokens=train.max_tokens_per_micro_batch,
            bucket=train.length_bucket,
            least=least,
        )

    def towers(self, rank: int, one: Pass) -> list[TowerBatch]:
        """Describe the vision tower of a rank's pass for each size of batch."""
        phase, name, kind = one
        part = self.models[name][rank]
        vision = part.model.vision
        if vision is None or part.coordinates.pp > 0:
            return []
        if kind == "generate":
            prompts = {max(engine.prompts for engine in self.engines(phase, name))}
        else:
            prompts = {len(micro.groups) for micro in self.micro_batches(kind, name)}
        pictures = self.lengths.problem_pictures if phase == "testing" else self.lengths.pictures
        stage = self.stage(name, rank)
        if self.keeps_tower(name):
            return [TowerBatch.outside(stage, pictures, max(prompts))]
        padded = {pictures.padded(number, vision) for number in prompts}
        return [TowerBatch.inside(stage, sizes) for sizes in sorted(padded, reverse=True)]

    def keeps_tower(self, name: str) -> bool:
        """Test for a model whose vision tower runs outside of its graphs."""
        role = role_of(name)
        own = self.roles[name].model
        part = next(iter(self.models[name].values()))
        outside = own.vision is not None and not role.listed and not part.gathered
        return outside and not tower_trains(self.model) and role.keeps_tower(own, self.config)

    def image_rows_bytes(self, rank: int) -> int:
        """Bound the bytes of the images' rows that a rank keeps (`train.tower_cache_gb`)."""
        parts = {name: ranks[rank] for name, ranks in self.models.items() if rank in ranks and self.keeps_tower(name)}
        towers = {self.roles[name].path: part.model for name, part in parts.items() if part.coordinates.pp == 0}
        limit = int(self.config.train.tower_cache_gb * GIB)
        tokens = self.lengths.different_tokens
        widths = sum(model.hidden_size for model in towers.values())
        return limit * bool(towers) if tokens is None else min(limit, tokens * widths * FLOAT32)

    def stage(self, name: str, rank: int, updates: bool = False) -> Stage:
        """Describe a rank's part of a model, as its graphs see it.

        updates: graphs of updates, which may drop adapters' inputs.
        """
        yaml = self.yaml(name)
        part = self.models[name][rank]
        products = yaml.model.compute_dtype
        dtype = yaml.context.device.activations(products)
        drops = updates and part.model.dropout > 0
        fused = self.fused and not drops
        return Stage(
            model=part.model,
            tp=part.mesh.tp,
            ep=part.mesh.ep,
            layers=graph_layers(part),
            is_last=part.coordinates.pp == part.mesh.pp - 1,
            sequence=part.sequence,
            itemsize=activations.ITEMSIZE[dtype],
            fused=fused,
            recompute=yaml.recomputes and fused,
            in_blocks=yaml.recomputes and updates and not fused,
            drops=drops,
            rounds=products != dtype,
            scoreless=dtype in yaml.context.device.attention.scoreless,
        )


def group_parts(work: Work, rank: int) -> dict[str, list[int]]:
    """Compute the bytes of each part of the memory groups that a rank has."""
    infer = work.infers.get(rank)
    apart = dict.fromkeys(work.models, 0)
    weights: dict[str, list[int]] = {}
    updates: dict[str, list[int]] = {}
    gathered: dict[tuple[str, Shape], int] = {}
    for name, part in ((name, ranks[rank]) for name, ranks in work.models.items() if rank in ranks):
        role = role_of(name)
        gathered |= gathered_bytes(part)
        if role.training:
            apart[name], moments = optimizer_bytes(part, work.config.memory.swap, role.optimizer(work.config).state)
            updates |= {role.training.gradients: [gradient_bytes(part)], role.training.moments: moments}
        if role not in (POLICY, GENERATOR):
            numbers = numbers_bytes(part, work.roles[name].own(part.specs)) + apart[name]
            cache = _cache_bytes(work, name, rank, work.verdict_engines(name))
            weights.setdefault(role.weights[0], []).append(numbers + cache)
    packed = packed_bytes(infer, work.packed, work.config.rollout.weights)
    policy = policy_bytes(work.trains.get(rank), infer, apart[POLICY.name], packed)
    caches = {
        group: [_cache_bytes(work, GENERATOR.name, rank, work.engines(phase))]
        for group, phase in ((phases.CACHE, "gen"), (phases.VALIDATION_CACHE, "testing"))
        if infer
    }
    weights[phases.GATHERED] = [sum(gathered.values())]
    return {group: sizes for group, sizes in (policy | weights | updates | caches).items() if sum(sizes)}


def _cache_bytes(work: Work, name: str, rank: int, engines: Iterable[Engine]) -> int:
    """Compute the bytes of the caches of a model's engines on a rank."""
    return sum(activations.cache_bytes(work.stage(name, rank), engine) for engine in engines)


def pool_bytes(work: Work, rank: int) -> dict[str, int]:
    """Compute the peak bytes of activations on a rank in each phase."""
    found: dict[str, int] = {}
    for one in work.passes_of(rank):
        found[one.phase] = max(found.get(one.phase, 0), _peak(work, rank, one))
    return found


def _peak(work: Work, rank: int, one: Pass) -> int:
    """Compute the peak bytes of activations of a model's pass."""
    phase, name, kind = one
    stage = work.stage(name, rank, kind == "update")
    part = work.models[name][rank]
    micros = () if kind == "generate" else work.micro_batches(kind, name)
    if not micros:
        text = max(activations.generate_bytes(stage, engine) for engine in work.engines(phase, name))
    elif part.gathered:
        text = activations.block_bytes(stage, micros, len(part.layers), kind == "update")
    elif stage.in_blocks:
        text = activations.block_bytes(stage, micros[:1], len(part.layers), True)
    elif kind == "score":
        text = activations.score_bytes(stage, micros[0])
    else:
        in_flight = work.train.parallel.pipeline_stage - part.coordinates.pp
        text = activations.update_bytes(stage, micros[0], in_flight)
    return max((tower.peak_bytes(text, kind) for tower in work.towers(rank, one)), default=text)


def process_bytes(work: Work, rank: int) -> int:
    """Compute bytes of a process: itself, its tokenizer, graphs, operators' tables."""
    graphs = (FUSED_GRAPHS if work.fused else COMPOSED_GRAPHS)["first"]
    patches = 0
    for one in work.passes_of(rank):
        _, name, kind = one
        stage = work.stage(name, rank, kind == "update")
        micro = work.micro_batches(kind, name) if kind == "update" else ()
        graphs += (FUSED_GRAPHS if stage.fused else COMPOSED_GRAPHS)[kind] * stage.layers
        graphs += activations.update_tables(stage, micro[0]) if micro else 0
        towers = work.towers(rank, one)
        graphs += sum(tower.graph_bytes(kind) for tower in towers)
        patches = max([patches, *(max(1, len(micro)) * tower.array_bytes for tower in towers)])
    return PROCESS + TOKENIZER_ROW * work.model.vocab_size + graphs + patches + work.image_rows_bytes(rank)
