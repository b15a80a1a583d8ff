"""Parts of a run's models that a rank holds, by role."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.configs.grpo import GRPOSettings
from mindrlhf.configs.model_yaml import ModelYaml
from mindrlhf.memory.residency import Residency
from mindrlhf.metrics.timer import Timers
from mindrlhf.model_roles import GENERATOR, POLICY, ROLES, SCORE, RoleModel, role_of
from mindrlhf.models.vision.fixed_tower import KnownRows
from mindrlhf.parallel.partition import Partition
from mindrlhf.roles.critic import Critic
from mindrlhf.roles.exchange import Exchange, ScoredApart
from mindrlhf.roles.generator import Generator
from mindrlhf.roles.part import Arrays, ModelPart, Opening, RolePart
from mindrlhf.roles.policy import Policy
from mindrlhf.roles.policy_updates import sequences
from mindrlhf.roles.reference import Reference
from mindrlhf.roles.teacher import Teacher
from mindrlhf.roles.trained import TrainedModel
from mindrlhf.types import Experience, with_missing

PARTS: Mapping[str, type[RolePart]] = {
    "reference": Reference,
    "teacher": Teacher,
    "policy": Policy,
    "critic": Critic,
    "generator": Generator,
}


class Parts(dict[str, ModelPart]):
    """Role -> this rank's part of its model, in the order of `model_roles.ROLES`."""

    @property
    def policy(self) -> TrainedModel:
        """Part of the policy; KeyError on a rank that only generates."""
        return self[POLICY.name]

    @property
    def publishing(self) -> TrainedModel | Generator | None:
        """Part that brings updated weights to the graphs that generate.

        It is the generator's on a rank without the policy, and None on a rank that only scores.
        """
        return self.get(POLICY.name) or self.get(GENERATOR.name)

    def scoring(self) -> Iterator[ModelPart]:
        """Yield the parts that score tokens before a step's updates, in order."""
        return (part for part in self.values() if part.scorer)

    def with_scores(self, experiences: list[Experience], timers: Timers) -> list[Experience]:
        """Add what these parts compute of each token before updates, if still missing."""
        groups = [sequences(e) for e in experiences]
        for part in self.scoring():
            scoring = part.role.scoring
            with timers(scoring.phase):
                rows = part.scorer(groups)
            experiences = with_missing(experiences, scoring.array, rows)
        return experiences

    def trained(self) -> Iterator[ModelPart]:
        """Yield the parts that are trained alongside the policy."""
        return (part for name, part in self.items() if name != POLICY.name and part.updater)

    def arrays(self) -> Arrays:
        """Return kind -> (layout, parameters) of everything that training changes."""
        return {kind: group for part in self.values() for kind, group in part.arrays().items()}

    def counters(self) -> dict[str, Any]:
        """Return name -> object with a state, of all parts."""
        return {name: counter for part in self.values() for name, counter in part.counters().items()}

    def exchange(
        self, yamls: Mapping[str, ModelYaml], roles: Iterable[str], collectives: Collectives, timers: Timers
    ) -> Exchange:
        """Open the exchange with ranks that only score.

        It moves nothing on ranks that generate, and without such ranks. yamls, roles: of the job. timers: count what it
        waits.
        """
        train, score = yamls["train"].ranks, yamls[SCORE].ranks if SCORE in yamls else ()
        if not score or collectives.world.rank not in {*train, *score}:
            return Exchange()
        apart = [role for role in map(role_of, roles) if role.apart]
        axis = next(iter(self.values())).data_parallel  # all parts of a side have the same
        return ScoredApart(apart, train, score, collectives, axis, timers)

    def register(self, residency: Residency) -> None:
        """Let trained parts leave memory in phases that do not need them."""
        for part in (self.publishing, *self.trained()):
            if part:
                part.register(residency)


def open_parts(
    config: GRPOSettings,
    yamls: Mapping[str, ModelYaml],
    roles: Mapping[str, RoleModel],
    collectives: Collectives,
    max_positions: int,
    checkpoint: Checkpoint | None,
    residency: Residency,
    known_rows: KnownRows | None = None,
    zeros: bool = False,
) -> Parts:
    """Open a rank's parts of a run; all ranks do it together.

    Parts that are not trained leave memory before others are loaded. yamls, roles: of the job. checkpoint: of a run
    that is resumed. known_rows, zeros: see `Opening`.
    """
    opening = Opening(config, yamls, roles, collectives, max_positions, checkpoint, known_rows=known_rows, zeros=zeros)
    rank = collectives.world.rank
    parts = Parts()
    for name in (name for name, role in ROLES.items() if name in roles and rank in yamls[role.layout_in(yamls)].ranks):
        part = parts[name] = PARTS[name](opening)
        if ROLES[name].training is None:
            part.register(residency)
    for part in parts.values() if POLICY.name in parts else ():
        part.join(parts.policy)
    if GENERATOR.name in roles and not {POLICY.name, GENERATOR.name} <= parts.keys():
        publish_between_ranks(opening, parts)
    return parts


def publish_between_ranks(opening: Opening, parts: Parts) -> None:
    """Bring the first weights from ranks that train to ranks that generate."""
    opening.collectives.peers()  # a library connects all ranks at once
    if parts.publishing is None:
        return
    generator = parts.get(GENERATOR.name)
    other = POLICY if generator else GENERATOR
    theirs = Partition.every_rank(opening.yamls[other.layout], opening.roles[other.name].model)[0]
    if generator:
        generator.receive_from(theirs)
    else:
        parts.policy.publish_to_ranks(theirs)
