"""The phases of a step: timers, memory needs and labels. Pure Python.

The names are those of timers; each phase says which weights it needs in memory, and how tables show it.
A role is a set of parameters that enter and leave memory together (`memory.residency`).
"""

from dataclasses import dataclass
from typing import Literal

# Roles of the policy: parameters with the same part in both layouts, and the other parameters in each layout.
SHARED, TRAIN, INFER = "shared_weights", "train_weights", "infer_weights"
SHARED_BASE, TRAIN_BASE, INFER_BASE = "shared_base_weights", "train_base_weights", "infer_base_weights"
POLICY_ROLES = {True: (SHARED, TRAIN, INFER), False: (SHARED_BASE, TRAIN_BASE, INFER_BASE)}  # by whether they train
CACHE, VALIDATION_CACHE = "kv_cache", "validation_kv_cache"
REFERENCE, TEACHER = "reference", "teacher"
GRADIENTS, MOMENTS = "gradients", "moments"
CRITIC, CRITIC_GRADIENTS, CRITIC_MOMENTS = "critic", "critic_gradients", "critic_moments"
POLICY, BASE = (SHARED, TRAIN), (SHARED_BASE, TRAIN_BASE)
GENERATING = (SHARED, INFER, SHARED_BASE, INFER_BASE)

Kind = Literal["generate", "score", "update"]
PASSES: dict[Kind, int] = {"generate": 1, "score": 1, "update": 3}  # a backward pass counts as two forward passes


@dataclass(frozen=True)
class Phase:
    """One phase of a step.

    label: short name in tables and on the console. kind: computation of the model, if any. reads, writes: roles that it
    needs; the content of written roles changes. parts: roles that it needs and writes one part at a time, after calling
    `Residency.use` with the part. A phase without roles leaves memory as it is. per_token: its time is also reported
    per token. model: the model that it runs.
    """

    label: str
    kind: Kind | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    per_token: bool = False
    model: Literal["policy", "critic", "teacher"] = "policy"

    @property
    def roles(self) -> set[str]:
        return {*self.reads, *self.writes, *self.parts}

    @property
    def passes(self) -> int:
        """Forward passes over a step's tokens; 0 if it has other tokens or none."""
        return PASSES[self.kind] if self.kind and self.per_token else 0

    @property
    def mfu(self) -> str | None:
        """Last part of its utilization metric's name; None without such a metric."""
        names = {"generate": "rollout", "update": "critic" if self.model == "critic" else "actor"}
        return names.get(self.kind) if self.passes else None


PHASES = {
    "step": Phase("step"),
    "gen": Phase("gen", "generate", reads=GENERATING, writes=(CACHE,), per_token=True),
    "reward": Phase("reward"),
    "ref": Phase("ref", "score", reads=(REFERENCE, *BASE), per_token=True),
    "teacher": Phase("teacher", "score", reads=(TEACHER,), per_token=True, model="teacher"),
    "old_log_prob": Phase("old log-prob", "score", reads=(*POLICY, *BASE), per_token=True),
    "values": Phase("values", "score", reads=(CRITIC,), per_token=True, model="critic"),
    "adv": Phase("adv", per_token=True),
    "update_critic": Phase(
        "train critic",
        "update",
        writes=(CRITIC, CRITIC_GRADIENTS),
        parts=(CRITIC_MOMENTS,),
        per_token=True,
        model="critic",
    ),
    "update_actor": Phase("train", "update", BASE, (*POLICY, GRADIENTS), (MOMENTS,), per_token=True),
    "sync_ref": Phase("sync ref", reads=POLICY, writes=(REFERENCE,)),
    "reshard": Phase("reshard", reads=POLICY, writes=(INFER,)),
    "compile": Phase("compile"),
    "testing": Phase("eval", "generate", reads=GENERATING, writes=(VALIDATION_CACHE,)),
    "report": Phase("report"),
    "save_checkpoint": Phase("save", reads=(*POLICY, MOMENTS, REFERENCE, CRITIC, CRITIC_MOMENTS)),
    "export": Phase("export", reads=(*POLICY, *BASE, CRITIC)),
    "load_checkpoint": Phase("load", writes=(*POLICY, INFER, MOMENTS, REFERENCE, CRITIC, CRITIC_MOMENTS)),
}
ROLES = frozenset(role for phase in PHASES.values() for role in phase.roles)
