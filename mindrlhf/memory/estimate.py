"""Memory of each rank of a job, from its settings alone. Pure Python.

Roles and phases are those of `mindrlhf.phases`, and are counted here as in a run
(`swap/role_gb/*`, `swap/resident_gb/*`). Estimates join the roles: the activations of graphs
(`memory.activations`), and on CPU the process itself, its compiled graphs and its kernels' tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from mindrlhf.backend.native import library
from mindrlhf.configs.grpo import GRPOConfig
from mindrlhf.configs.model import ModelConfig
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.memory.activations import (
    ITEMSIZE,
    Stage,
    generate_bytes,
    score_bytes,
    update_bytes,
    update_tables,
)
from mindrlhf.memory.residency import BLOCK_NUMBERS, moving_roles
from mindrlhf.parallel.buckets import buckets
from mindrlhf.parallel.layout import Layout
from mindrlhf.parallel.partition import Partition
from mindrlhf.phases import (
    CACHE,
    CRITIC,
    CRITIC_GRADIENTS,
    CRITIC_MOMENTS,
    GRADIENTS,
    INFER,
    MOMENTS,
    PHASES,
    REFERENCE,
    SHARED,
    TRAIN,
    VALIDATION_CACHE,
)
from mindrlhf.shapes import cache_positions, padded_prefix, pool_size, round_responses, slot_count
from mindrlhf.training.batch import MicroBatch, cut_alike
from mindrlhf.units import FLOAT32, GIB, MIB

# Measured with MindSpore 2.9 on CPU: Python with everything imported, and compiled graphs, the first and of each layer.
PROCESS = 445 * MIB
FUSED_GRAPHS = {"first": 78 * MIB, "generate": 2 * MIB, "score": 2 * MIB, "update": 4 * MIB}
COMPOSED_GRAPHS = {"first": 145 * MIB, "generate": 16 * MIB, "score": 8 * MIB, "update": 46 * MIB}
TOKENIZER_ROW = 600  # bytes of a token in the tokenizer's tables


@dataclass(frozen=True)
class Lengths:
    """Sizes of the data.

    They are the longest prompt in tokens, and of held-out problems the number and their longest, or 0.
    """

    prompt: int
    problems: int = 0
    problem: int = 0


@dataclass(frozen=True)
class RankPlan:
    """Memory of one rank.

    roles: bytes of each. phases: phase -> role -> bytes in memory then; of a role in parts, its largest one. pools:
    phase -> bytes of activations. process: bytes of everything else on CPU; 0 on a device.
    """

    rank: int
    roles: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    pools: Mapping[str, int]
    process: int

    @cached_property
    def totals(self) -> dict[str, int]:
        """Bytes in each phase.

        On CPU activations come from a pool that gives nothing back, so that it counts as large as any phase makes it. A
        device has one pool for them and for roles, which reuses the memory that swap has freed.
        """
        return {
            phase: sum(held.values()) + (self.process + self.pool if self.process else self.pools.get(phase, 0))
            for phase, held in self.phases.items()
        }

    @property
    def pool(self) -> int:
        """Bytes of activations in the phase with the most."""
        return max(self.pools.values(), default=0)

    @property
    def peak_phase(self) -> str:
        return max(self.totals, key=lambda phase: (self.totals[phase], self.pools.get(phase, 0)))

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return self.totals[self.peak_phase]


@dataclass(frozen=True)
class Work:
    """Sizes of a job that determine its memory.

    train, infer: of the same workers. trains, infers, critics: every rank's part of the model that trains, of the one
    that generates, and of a critic's. fused: graphs have the fused operators of `backend.native`.
    """

    config: GRPOConfig
    model: ModelConfig
    train: ModelYaml
    infer: ModelYaml
    lengths: Lengths
    trains: Sequence[Partition]
    infers: Sequence[Partition]
    critics: Sequence[Partition]
    fused: bool

    @classmethod
    def of(cls, config: GRPOConfig, model: ModelConfig, train: ModelYaml, infer: ModelYaml, lengths: Lengths) -> "Work":
        """Compute the sizes from the settings.

        Raises UserError where a layout does not divide the model.
        """
        pairs = ((train, model), (infer, model), (train, model.as_critic()))
        fused = train.context.device_target == "CPU" and library().path is not None
        return cls(config, model, train, infer, lengths, *(Partition.every_rank(*pair) for pair in pairs), fused)

    @cached_property
    def ranks(self) -> range:
        return range(self.train.parallel.workers)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Layouts of training and of generation."""
        return self.trains[0].layout, self.infers[0].layout

    @cached_property
    def publishes(self) -> bool:
        """True when weights move after an update, because the layouts differ."""
        train, infer = self.layouts
        return train != infer

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """Phases of a run, in order."""
        algorithm, trainer = self.config.algorithm, self.config.trainer
        happens = {
            "gen": True,
            "ref": algorithm.beta > 0,
            "old_log_prob": algorithm.scores_old_policy,
            "values": algorithm.uses_critic,
            "update_critic": algorithm.uses_critic,
            "update_actor": True,
            "sync_ref": algorithm.beta > 0 and algorithm.reference_sync_steps > 0,
            "reshard": self.publishes,
            "testing": self.lengths.problems > 0,
            "save_checkpoint": trainer.save_freq is not None or trainer.save_best_metric is not None,
            "export": True,
        }
        return tuple(phase for phase, wanted in happens.items() if wanted)

    def rank_plan(self, rank: int) -> RankPlan:
        """Plan the memory of `rank`."""
        parts = role_parts(self, rank)
        roles = {role: sum(sizes) for role, sizes in parts.items()}
        target = self.train.context.device_target
        moving = moving_roles(self.config.memory.swap, target)
        held = {}
        for phase in self.phases:
            needs = PHASES[phase].needs
            held[phase] = {
                role: max(sizes) if role in moving and role in needs.parts else sum(sizes)
                for role, sizes in parts.items()
                if role in needs.roles or role not in moving
            }
        on_device = target != "CPU"
        return RankPlan(rank, roles, held, pools(self, rank), 0 if on_device else process_bytes(self, rank))

    def rank_plans(self) -> list[RankPlan]:
        return [self.rank_plan(rank) for rank in self.ranks]


def device_limit(yaml: ModelYaml) -> int | None:
    """Bytes that `context.max_device_memory` allows; None where it is not set."""
    text = yaml.context.max_device_memory
    return None if text is None else int(float(text.removesuffix("GB")) * GIB)  # as MindSpore means it


def role_parts(work: Work, rank: int) -> dict[str, list[int]]:
    """Compute the bytes of each part of a rank's roles.

    Roles without a parameter on the rank are left out.
    """
    config = work.config
    train, infer = work.trains[rank], work.infers[rank]
    shared = {spec.name for spec in infer.specs if train.slices(spec) == infer.slices(spec)}
    sizes = {spec.name: prod(train.shape(spec)) * FLOAT32 for spec in train.specs}
    weights = sum(sizes.values())
    kept_apart, moments = _optimizer(train, config.memory.swap)
    parts = {
        SHARED: [sum(size for name, size in sizes.items() if name in shared)],
        TRAIN: [sum(size for name, size in sizes.items() if name not in shared) + kept_apart],
        INFER: [sum(prod(infer.shape(spec)) * FLOAT32 for spec in infer.specs if spec.name not in shared)],
        REFERENCE: [weights if config.algorithm.beta > 0 else 0],
        GRADIENTS: [weights],
        MOMENTS: moments,
        CACHE: [sum(cache_bytes(work, rank, engine) for engine in engines(work))],
        VALIDATION_CACHE: [cache_bytes(work, rank, engine) for engine in validation_engines(work)],
    }
    if config.algorithm.uses_critic:
        critic = work.critics[rank]
        kept_apart, moments = _optimizer(critic, config.memory.swap)
        weights = sum(prod(critic.shape(spec)) for spec in critic.specs) * FLOAT32
        parts |= {CRITIC: [weights + kept_apart], CRITIC_GRADIENTS: [weights], CRITIC_MOMENTS: moments}
    return {role: sizes for role, sizes in parts.items() if sum(sizes)}


def _optimizer(part: Partition, in_blocks: bool) -> tuple[int, list[int]]:
    """Compute bytes of separately updated rows, and of each block of moments.

    A replica updates the rows apart from the parameters.
    """
    updated, apart, sizes = [], 0, []
    for spec in part.specs:
        shape = part.shape(spec)
        rows = part.updated_rows(spec)
        own = (rows.stop - rows.start) * prod(shape[1:]) * FLOAT32
        updated.append(own)
        sizes.append(prod(shape))
        apart += own if rows.stop - rows.start < shape[0] else 0
    blocks = buckets(sizes, BLOCK_NUMBERS if in_blocks else sum(sizes))
    return apart, [2 * sum(updated[index] for index in block) for block in blocks]


@dataclass(frozen=True)
class EngineSize:
    """Size of an engine: slots, and tokens of its longest prompt and response."""

    slots: int
    prompt: int
    response: int


def engines(work: Work) -> Iterator[EngineSize]:
    """List the engines that answer a step's prompts on one rank."""
    config, prompt = work.config, work.lengths.prompt
    for responses in round_responses(config, work.infer.parallel.data_parallel):
        if responses:
            yield EngineSize(slot_count(config.rollout.max_slots, responses), prompt, config.rollout.max_new_tokens)


def validation_engines(work: Work) -> Iterator[EngineSize]:
    """List the engine that answers held-out problems, if any.

    The first ranks have one problem more where they do not divide.
    """
    config, lengths = work.config, work.lengths
    if lengths.problems:
        sampling = config.validation.completed(config.rollout)
        share = -(-lengths.problems // work.infer.parallel.data_parallel)
        slots = slot_count(config.rollout.max_slots, share * sampling.num_generations)
        yield EngineSize(slots, lengths.problem, sampling.max_new_tokens)


def cache_bytes(work: Work, rank: int, engine: EngineSize) -> int:
    """Compute keys and values of an engine's slots on a rank."""
    stage = _stage(work, work.infer, work.infers[rank])
    positions = cache_positions(engine.prompt, engine.response, work.config.train.length_bucket)
    return 2 * stage.layers * engine.slots * stage.key * positions * stage.itemsize


def score_micro(work: Work) -> MicroBatch:
    """Find the largest micro-batch of a pass without gradients."""
    return _largest(work, work.config.data.prompts_per_step // work.train.parallel.data_parallel, 1)


def update_micro(work: Work) -> MicroBatch:
    """Find the largest micro-batch of an update."""
    parallel = work.train.parallel
    groups = work.config.data.prompts_per_step // work.config.algorithm.updates_per_iteration // parallel.data_parallel
    return _largest(work, groups, parallel.micro_batch_num if parallel.pipeline_stage > 1 else 1)


def _largest(work: Work, groups: int, least: int) -> MicroBatch:
    rollout, train = work.config.rollout, work.config.train
    return cut_alike(
        groups,
        work.lengths.prompt,
        rollout.num_generations,
        rollout.max_new_tokens,
        train.max_tokens_per_micro_batch,
        train.length_bucket,
        least,
    )[0]


def pools(work: Work, rank: int) -> dict[str, int]:
    """Compute the peak bytes of activations on a rank in each phase."""
    found = {}
    train, infer = _stage(work, work.train, work.trains[rank]), _stage(work, work.infer, work.infers[rank])
    critic = _stage(work, work.train, work.critics[rank])
    parallel = work.train.parallel
    in_flight = parallel.pipeline_stage - work.trains[rank].coordinates.pp
    for name in work.phases:
        phase = PHASES[name]
        stage = critic if phase.critic else train
        if phase.kind == "generate":
            sizes = engines(work) if name == "gen" else validation_engines(work)
            found[name] = max(_engine_pool(work, infer, engine) for engine in sizes)
        elif phase.kind == "score":
            found[name] = score_bytes(stage, score_micro(work))
        elif phase.kind == "update":
            found[name] = update_bytes(stage, update_micro(work), in_flight)
    return found


def _engine_pool(work: Work, stage: Stage, engine: EngineSize) -> int:
    bucket = work.config.train.length_bucket
    prompts = pool_size(engine.slots, work.config.rollout.num_generations)
    positions = cache_positions(engine.prompt, engine.response, bucket)
    return generate_bytes(stage, prompts, padded_prefix(engine.prompt, bucket), engine.slots, positions)


def process_bytes(work: Work, rank: int) -> int:
    """Bytes of a CPU process besides roles and activations.

    They are itself, its tokenizer, compiled graphs, kernels' tables.
    """
    stage, layers = _stage(work, work.train, work.trains[rank]), len(work.infers[rank].layers)
    micro = update_micro(work)
    each = FUSED_GRAPHS if work.fused else COMPOSED_GRAPHS
    kinds = [PHASES[phase].kind for phase in work.phases]
    graphs = each["first"] + each["generate"] * layers * kinds.count("generate")
    graphs += sum(each[kind] * kinds.count(kind) for kind in ("score", "update")) * stage.layers
    tables = kinds.count("update") * update_tables(stage, micro)
    return PROCESS + TOKENIZER_ROW * work.model.vocab_size + graphs + tables


def _stage(work: Work, yaml: ModelYaml, part: Partition) -> Stage:
    return Stage(
        part.model,
        part.mesh.tp,
        len(part.layers),
        part.coordinates.pp == part.mesh.pp - 1,
        part.sequence,
        ITEMSIZE[yaml.model.compute_dtype],
        work.fused,
        yaml.recompute.recompute is True and part.mesh.pp == 1,
    )
