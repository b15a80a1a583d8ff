"""Memory of one rank, and the computations of a run's phases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mindrlhf import phases


class Pass(NamedTuple):
    """Computation of a phase with one model, by their names."""

    phase: str
    model: str
    kind: phases.Kind


@dataclass(frozen=True)
class RankPlan:
    """Memory of one rank in bytes.

    roles: role -> bytes. phases: phase -> role -> bytes in memory; for a role in parts, its largest part. activations:
    phase -> peak bytes. process: everything else on CPU. extra: the same on a device, by names. totals: phase -> bytes.
    """

    rank: int
    roles: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    activations: Mapping[str, int]
    process: int
    extra: Mapping[str, int]
    totals: Mapping[str, int]
    peak: int
    peak_phase: str
