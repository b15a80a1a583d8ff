"""Memory of each rank of a job, from its settings alone. Pure Python.

Roles are counted as in a run (`swap/role_gb/*`, `swap/resident_gb/*`). Estimates are added to them: the activations of
graphs, and on CPU the process itself, its compiled graphs and its kernels' tables.
"""

from collections.abc import Iterable

from mindrlhf import phases
from mindrlhf.memory import activations
from mindrlhf.memory.activations import Engine
from mindrlhf.memory.device_extra import device_extra
from mindrlhf.memory.graph_sizes import COMPOSED_GRAPHS, FUSED_GRAPHS, PROCESS, TOKENIZER_ROW
from mindrlhf.memory.part_bytes import (
    gathered_bytes,
    gradient_bytes,
    numbers_bytes,
    optimizer_bytes,
    packed_bytes,
    policy_bytes,
)
from mindrlhf.memory.rank_plan import Pass, RankPlan
from mindrlhf.memory.residency import moving_roles
from mindrlhf.memory.work import Work
from mindrlhf.model_roles import GENERATOR, POLICY, role_of
from mindrlhf.parallel.layout import Shape


def rank_plans(work: Work) -> list[RankPlan]:
    return [rank_plan(work, rank) for rank in work.ranks]


def rank_plan(work: Work, rank: int) -> RankPlan:
    """Plan the memory of `rank`.

    In host memory, activations come from a pool that never shrinks, so that its largest size in any phase counts. A
    device has one pool for activations and roles, which reuses the memory that swap has freed.
    """
    parts = group_parts(work, rank)
    device = work.train.context.device
    moving = moving_roles(work.config.memory.swap, device)
    held = {}
    for phase in work.phases:
        needed = phases.PHASES[phase]
        held[phase] = {
            role: max(sizes) if role in moving and role in needed.parts else sum(sizes)
            for role, sizes in parts.items()
            if role in needed.groups or role not in moving
        }
    pools = pool_bytes(work, rank)
    process = process_bytes(work, rank) if device.in_host_memory else 0
    stays = process + max(pools.values(), default=0)
    totals = {phase: sum(roles.values()) + (stays if process else pools.get(phase, 0)) for phase, roles in held.items()}
    extra = device_extra(device, work.groups(rank), max(totals.values()))
    totals = {phase: total + sum(extra.values()) for phase, total in totals.items()}
    peak = max(totals, key=lambda phase: (totals[phase], pools.get(phase, 0)))
    roles = {role: sum(sizes) for role, sizes in parts.items()}
    return RankPlan(rank, roles, held, pools, process, extra, totals, totals[peak], peak)


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
    words = packed_bytes(infer, work.words(rank), work.infer.model.compute_dtype) if infer else {}
    weights[phases.WORDS] = [sum(words.values())]
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
        in_flight = work.yaml(name).parallel.pipeline_stage - part.coordinates.pp
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
