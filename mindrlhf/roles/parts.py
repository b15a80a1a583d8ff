"""Parts of a job's models that a rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mindrlhf.backend.comm.collectives import Collectives
from mindrlhf.checkpoint.resume import Checkpoint
from mindrlhf.job import Job
from mindrlhf.memory.residency import Residency
from mindrlhf.roles.critic import Critic
from mindrlhf.roles.fine_tuned import FineTuned
from mindrlhf.roles.generator import Generator
from mindrlhf.roles.part import Arrays, ModelPart
from mindrlhf.roles.policy import Policy
from mindrlhf.roles.reference import Reference
from mindrlhf.roles.teacher import Teacher


@dataclass(frozen=True)
class Parts:
    """Policy, reference, critic and teacher, and the policy in the generation layout.

    reference: None if beta is 0. critic, teacher: None if not used. generator: None for a replay.
    """

    policy: Policy | FineTuned
    reference: Reference | None
    critic: Critic | None
    generator: Generator | None
    teacher: Teacher | None = None

    def __iter__(self) -> Iterator[ModelPart]:
        return (part for part in (self.policy, self.critic, self.reference, self.teacher) if part is not None)

    def scoring(self) -> Iterator[ModelPart]:
        """Yield the parts that score tokens before a step's updates, in order."""
        parts = (self.reference, self.teacher, self.policy, self.critic)
        return (part for part in parts if part is not None and part.scorer)

    def arrays(self) -> Arrays:
        """Return kind -> (layout, parameters) of everything that training changes."""
        return {kind: group for part in self for kind, group in part.arrays().items()}

    def counters(self) -> dict[str, Any]:
        """Return name -> object with a state, of all parts."""
        return {name: counter for part in self for name, counter in part.counters().items()}

    def register(self, residency: Residency) -> None:
        """Let trained parts leave memory in phases that do not need them."""
        for part in (self.policy, self.critic):
            if part is not None:
                part.register(residency)


def open_parts(
    job: Job,
    collectives: Collectives,
    max_positions: int,
    checkpoint: Checkpoint | None,
    residency: Residency,
    generates: bool,
) -> Parts:
    """Open the parts of a run; all ranks do it at the same time.

    Reference and teacher are loaded first, and leave memory before the others are loaded.
    checkpoint: of a run that is resumed. generates: False for a replay.
    """
    algorithm, place = job.config.algorithm, (collectives, max_positions)
    reference = Reference(job, *place) if algorithm.beta > 0 else None
    teacher = Teacher(job, *place) if job.teacher else None
    for frozen in filter(None, (reference, teacher)):
        frozen.register(residency)
    policy = Policy(job, *place, checkpoint)
    if reference:
        reference.join(policy)
    critic = Critic(job, *place, checkpoint) if algorithm.uses_critic else None
    generator = Generator(job, *place) if generates else None
    if generator:
        policy.publish_to(generator)
    return Parts(policy, reference, critic, generator, teacher)
