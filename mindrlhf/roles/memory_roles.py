"""Which parameters of a job play which role in its memory (`mindrlhf.phases`)."""

from collections.abc import Sequence

from mindrlhf.backend.memory import open_store
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency, moving_roles
from mindrlhf.phases import (
    CACHE,
    CRITIC,
    CRITIC_GRADIENTS,
    CRITIC_MOMENTS,
    GRADIENTS,
    INFER,
    MOMENTS,
    SHARED,
    TRAIN,
    VALIDATION_CACHE,
)
from mindrlhf.roles.critic import Critic
from mindrlhf.roles.weights import Parameters
from mindrlhf.rollout.engine import Engine
from mindrlhf.training.optimizer import AdamW
from mindrlhf.training.updater import Updater


def open_residency(job: Job) -> Residency:
    """What moves weights out and in at the phases of a step."""
    settings, target = job.config.memory, job.train.context.device_target
    folder = settings.swap_dir or job.output / "swap"
    return Residency(lambda parameters: open_store(target, parameters, folder), moving_roles(settings.swap, target))


def add_roles(
    residency: Residency,
    policy: Parameters,
    answering: Parameters,
    updater: Updater,
    engines: Sequence[Engine | None],
    validation: Engine | None,
    critic: Critic | None,
) -> None:
    """Everything of a rank that comes and goes, but the reference."""
    optimizer = updater.optimizer
    shared = {id(parameter) for parameter in answering.values()} & {id(parameter) for parameter in policy.values()}
    residency.add(GRADIENTS, optimizer.gradients, zeros=True)
    _add_moments(residency, MOMENTS, optimizer)
    residency.add(SHARED, (p for p in policy.values() if id(p) in shared))
    residency.add(TRAIN, (*(p for p in policy.values() if id(p) not in shared), *optimizer.own_rows))
    residency.add(INFER, (p for p in answering.values() if id(p) not in shared))
    for role, users in ((CACHE, engines), (VALIDATION_CACHE, [validation])):
        caches = [engine.cache for engine in users if engine]
        residency.add(role, [p for cache in caches for p in (*cache.keys, *cache.values)], zeros=True)
    if critic:
        residency.add(CRITIC, (*critic.parameters.values(), *critic.optimizer.own_rows))
        residency.add(CRITIC_GRADIENTS, critic.optimizer.gradients, zeros=True)
        _add_moments(residency, CRITIC_MOMENTS, critic.optimizer)


def _add_moments(residency: Residency, role: str, optimizer: AdamW) -> None:
    """A part of the role for each block of the optimizer, which asks for one after the other."""
    for number, block in enumerate(optimizer.blocks):
        moments = [moment[i] for i in block for moment in (optimizer.first, optimizer.second)]
        residency.add(f"{role}.{number}", moments, zeros=True)
    optimizer.before_block = lambda number: residency.use(f"{role}.{number}")
