"""The phases of a step: timers, memory needs and labels. Pure Python.

The names are those of timers; each phase says which weights it needs in memory, and how tables show it.
"""

from dataclasses import dataclass
from typing import Literal

from mindrlhf.model_roles import EXPORTED, GENERATOR, INFER, POLICY, REFERENCE, ROLES, SAVED, TRAINED, Role

# Memory groups of generation, the last one of weights that are packed for a session; and of weights that ranks share
# and that are gathered for one block at a time.
CACHE, VALIDATION_CACHE, WORDS, GATHERED = "kv_cache", "validation_kv_cache", "session_weights", "gathered_weights"

Kind = Literal["generate", "score", "update"]
PASSES: dict[Kind, int] = {"generate": 1, "score": 1, "update": 3}  # a backward pass counts as two forward passes


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    label: short name in tables and on the console. kind: computation of the model, if any. reads, writes: memory groups
    that it needs; the content of written groups changes. parts: groups that it needs and writes one part at a time,
    after calling `Residency.use` with the part. A phase without groups leaves memory as it is. per_token: its time is
    also reported per token. role: the role whose model it runs.
    """

    label: str
    kind: Kind | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    per_token: bool = False
    role: str = POLICY.name

    @property
    def groups(self) -> set[str]:
        """Memory groups that the phase needs."""
        return {*self.reads, *self.writes, *self.parts}

    @property
    def passes(self) -> int:
        """Forward passes over a step's tokens; 0 if it has other tokens or none."""
        return PASSES[self.kind] if self.kind and self.per_token else 0

    @property
    def mfu(self) -> str | None:
        """Last part of its utilization metric's name; None without such a metric."""
        if not self.passes or self.kind == "score":
            return None
        return "rollout" if self.kind == "generate" else ROLES[self.role].training.metrics


def _scoring(role: Role) -> Phase:
    reads = (*role.weights, *role.reads)
    writes = (GATHERED,) if role.layout == "train" else ()
    return Phase(role.scoring.label, "score", reads=reads, writes=writes, per_token=True, role=role.name)


def _update(role: Role) -> Phase:
    training = role.training
    return Phase(
        training.label,
        "update",
        reads=role.reads,
        writes=(*role.weights, training.gradients, GATHERED),
        parts=(training.moments,),
        per_token=True,
        role=role.name,
    )


_GENERATING = (*GENERATOR.weights, *GENERATOR.reads)
_SAVED = (
    *(group for role in SAVED for group in role.weights),
    *(role.training.moments for role in TRAINED),
)

PHASES = {
    "step": Phase("step"),
    "gen": Phase("gen", "generate", reads=_GENERATING, writes=(CACHE, WORDS), per_token=True, role=GENERATOR.name),
    "reward": Phase("reward"),
    "wait": Phase("wait"),
    **{role.scoring.phase: _scoring(role) for role in ROLES.values() if role.scoring},
    "adv": Phase("adv", per_token=True),
    **{role.training.phase: _update(role) for role in reversed(TRAINED)},
    "sync_ref": Phase("sync ref", reads=POLICY.weights, writes=REFERENCE.weights),
    "reshard": Phase("reshard", reads=POLICY.weights, writes=(INFER,)),
    "compile": Phase("compile"),
    "testing": Phase("eval", "generate", reads=_GENERATING, writes=(VALIDATION_CACHE, WORDS), role=GENERATOR.name),
    "report": Phase("report"),
    "save_checkpoint": Phase("save", reads=_SAVED),
    "export": Phase("export", reads=tuple(group for role in EXPORTED for group in (*role.weights, *role.reads))),
    "load_checkpoint": Phase("load", writes=(*_SAVED, INFER)),
}
MEMORY_GROUPS = frozenset(group for phase in PHASES.values() for group in phase.groups)
