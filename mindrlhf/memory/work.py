"""Sizes of a job that determine its memory and time. Pure Python."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from mindrlhf import phases
from mindrlhf.backend.native.names import halves
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml, rounds_rollouts
from mindrlhf.configs.placement import ByLayout
from mindrlhf.memory import activations
from mindrlhf.memory.activations import Engine, Stage
from mindrlhf.memory.device_extra import rank_groups
from mindrlhf.memory.part_bytes import (
    graph_layers,
)
from mindrlhf.memory.pictures import Lengths
from mindrlhf.memory.rank_plan import Pass
from mindrlhf.memory.reward_models import scoring_batches, scoring_yaml, verdict_engine
from mindrlhf.memory.tower_activations import TowerBatch
from mindrlhf.metrics.flops import GroupLengths
from mindrlhf.model_roles import GENERATOR, POLICY, REFERENCE, ROLES, SCORE, RoleModel, role_of
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.parameters import ParameterSpec, decoded_rows, tower_trains
from mindrlhf.models.routing import RoutingForm
from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.partition import Group, Partition
from mindrlhf.shapes import cache_positions, padded_prefix, pool_size, round_responses, slot_count
from mindrlhf.training.batch import MicroBatch, cut_alike
from mindrlhf.units import FLOAT32, GIB


@dataclass(frozen=True)
class Work(ByLayout):
    """Sizes of a job that determine its memory.

    roles, yamls: of the job. models: name -> rank -> part of the model, on the ranks that have one. fused: graphs have
    the operators of `backend.native`.
    """

    config: GRPOSettings
    roles: Mapping[str, RoleModel]
    yamls: Mapping[str, ModelYaml]
    lengths: Lengths
    models: Mapping[str, Mapping[int, Partition]]
    fused: bool

    @classmethod
    def of(
        cls,
        config: GRPOSettings,
        roles: Mapping[str, RoleModel],
        yamls: Mapping[str, ModelYaml],
        lengths: Lengths,
    ) -> "Work":
        """Compute the sizes; UserError if a layout does not divide a model."""
        model = roles[POLICY.name].model
        scoring = [part.rank for part in Partition.every_rank(yamls["infer"], model) if part.first_of_replica]
        models = {}
        for name, one in roles.items():
            role = role_of(name)
            every = partial(Partition.every_rank, yamls[role.layout_in(yamls)])
            parts = Partition.whole(one.model, scoring) if role.listed else every(one.model)
            models[name] = {part.rank: part for part in parts}
        fusing = not yamls["train"].context.device.fused_problem()
        fused = fusing and FAMILIES[model.family].all_halves(model) <= halves()
        return cls(config, roles, yamls, lengths, models, fused)

    @property
    def model(self) -> ModelConfig:
        """Architecture of the policy."""
        return self.roles["policy"].model

    def yaml(self, name: str) -> ModelYaml:
        """Model YAML of a model's graphs."""
        yaml = self.yamls[role_of(name).layout_in(self.yamls)]
        settings = self.roles[name].settings
        return scoring_yaml(yaml, settings) if settings else yaml

    @property
    def scorers(self) -> Sequence[int]:
        """Ranks that only score."""
        return self.yamls[SCORE].ranks if SCORE in self.yamls else ()

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

    def words(self, rank: int) -> list[ParameterSpec]:
        """List the rows of weights that a rank packs for each session.

        Decode steps round the trained ones then.
        """
        stage = self.stage(GENERATOR.name, rank)
        packs = self.config.rollout.weights == "train" and stage.fused and stage.rounds
        return decoded_rows(stage.model) if packs else []

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
        layouts = {role_of(name).layout_in(self.yamls): parts for name, parts in self.models.items() if name in ROLES}
        return rank_groups(self.ranks, list(layouts.values()), rank)

    @property
    def communicator_bytes(self) -> int:
        """Most bytes that groups of ranks take in one of them, on a device."""
        return self.train.context.device.communicator_bytes() * max(len(self.groups(rank)) for rank in self.ranks)

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
        parallel = self.yaml(name).parallel
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
