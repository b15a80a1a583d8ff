"""Residency of weights, moments, gradients and caches by phase of a step (`mindrlhf.phases`).

When a phase begins, roles that it does not need are put away, and then its own are brought back; roles of the phase
that followed it in the step before are read ahead. Content is written out only if it has changed since the last time.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from mindrlhf.backend.device import Device
from mindrlhf.backend.memory import Store
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.model_roles import TRAINED
from mindrlhf.phases import CACHE, GATHERED, MEMORY_GROUPS, PHASES, VALIDATION_CACHE, WORDS
from mindrlhf.units import GIB

BLOCK_NUMBERS = 64 * 2**20  # of moments that are swapped together: 256 MiB of each of the two
CACHES = frozenset((CACHE, VALIDATION_CACHE, WORDS, GATHERED))  # also of weights, for one session or block at a time
# Groups whose content need not be kept: gradients are zero between updates, a cache means nothing between generations.
SCRATCH = CACHES | {role.training.gradients for role in TRAINED}


def moving_roles(swap: bool, device: Device) -> frozenset[str]:
    """List the roles that are swapped.

    In host memory, caches are swapped even without `memory.swap`: releasing them costs next to nothing, and their
    unused memory is never allocated. Gradients are written whole, and allocating their memory again takes a second or
    more for each 2 GB, on virtual machines several seconds. A device has no such call.
    """
    return MEMORY_GROUPS if swap else CACHES if device.in_host_memory else frozenset()


@dataclass
class _Part:
    """Parameters of a role, or of a part of it, and their store."""

    role: str
    store: Store
    nbytes: int
    resident: bool = True
    changed: bool = False  # since its content was stored, or since the parameters were created as zeros

    @property
    def scratch(self) -> bool:
        return self.role in SCRATCH


class Residency:
    """Swapping of roles when phases begin.

    open_store: parameters -> the store to put them in (`backend.memory.open_store`). moving: roles that are swapped;
    the others stay in memory.
    """

    def __init__(self, open_store: Callable[[Sequence], Store], moving: Collection[str] = MEMORY_GROUPS):
        self._open_store = open_store
        self._moving = moving
        self._parts: dict[str, _Part] = {}
        self._sizes: dict[str, int] = {}  # of each role, whether it moves or not
        self._moved = {"out": 0, "in": 0}
        self._seconds = 0.0
        self._resident: dict[str, int] = {}
        self._phase = ""
        self._followed_by: dict[str, str] = {}  # phase -> the phase that followed it last time

    def add(self, name: str, parameters: Iterable, zeros: bool = False) -> None:
        """Register parameters under a role, and put them away until a phase needs them.

        A role may have parts, `role.0` and so on.
        zeros: the parameters are all zero, so that they need no file. Raises ValueError for a role that no phase uses.
        """
        parameters = list(parameters)
        role = _role(name)
        if role not in MEMORY_GROUPS:
            raise ValueError(f"no phase needs the role {name}")
        if name in self._parts:
            raise ValueError(f"the role {name} has its parameters already")
        nbytes = sum(parameter.nbytes for parameter in parameters)
        if nbytes:
            self._sizes[role] = self._sizes.get(role, 0) + nbytes
        if not parameters or role not in self._moving:
            return
        self._parts[name] = _Part(role, self._open_store(parameters), nbytes, changed=not zeros)
        self._put_away(self._parts[name])

    def enter(self, phase: str) -> None:
        """Bring a phase's roles into memory; ValueError for a phase that `PHASES` lacks."""
        if phase not in PHASES:
            raise ValueError(f"PHASES does not say what the phase {phase!r} needs")
        needs = PHASES[phase]
        wanted = {*needs.reads, *needs.writes}
        if not wanted:
            return
        start = time.perf_counter()
        self._followed_by[self._phase], self._phase = phase, phase
        for part in self._parts.values():
            if part.role not in wanted:
                self._put_away(part)
        for part in self._parts.values():
            if part.role in wanted:
                self._bring_back(part)
            part.changed |= part.role in needs.writes
        following = self._followed_by.get(phase)
        soon = PHASES[following].groups - SCRATCH if following else ()
        for part in self._parts.values():
            if not part.resident and part.role in soon:
                part.store.expect()  # all parts of a divided role: they are used one soon after another
        self._count(start)

    def disturbs(self, phase: str, roles: Collection[str]) -> bool:
        """Test that a phase changes one of these roles, or may put it away."""
        needs = PHASES[phase]
        disturbed = {*needs.writes, *needs.parts, *(self._moving if needs.groups else ())}
        return not disturbed.isdisjoint(roles)

    def use(self, name: str) -> None:
        """Keep only this part of its role in memory; ValueError outside its phases."""
        role = _role(name)
        if role not in self._moving:
            return
        if self._phase not in PHASES or role not in PHASES[self._phase].parts:
            raise ValueError(f"the phase {self._phase!r} does not use {role} in parts")
        start = time.perf_counter()
        for other, part in self._parts.items():
            if part.role == role and other != name:
                self._put_away(part)
        self._bring_back(self._parts[name])
        self._parts[name].changed = True
        self._count(start)

    def resident(self) -> dict[str, int]:
        """Return the bytes of each part of a role that is in memory now."""
        return {name: part.nbytes for name, part in self._parts.items() if part.resident}

    def report(self, metrics: MetricSet) -> None:
        """Add `swap/*` of this rank since the last call.

        These are the size of each role (`swap/role_gb/*`), bytes moved, seconds, and the most bytes of roles in memory
        in each phase; the sizes only, if nothing but scratch memory is swapped.
        """
        for role, nbytes in self._sizes.items():
            metrics.add_max(f"swap/role_gb/{role}", nbytes / GIB)
        if all(part.scratch for part in self._parts.values()):
            return
        for direction, nbytes in self._moved.items():
            metrics.add_total(f"swap/{direction}_gb", nbytes / GIB)
        metrics.add("swap/seconds", self._seconds)
        for phase, nbytes in self._resident.items():
            metrics.add_max(f"swap/resident_gb/{phase}", nbytes / GIB)
        self._moved = {"out": 0, "in": 0}
        self._seconds = 0.0
        self._resident = {}

    def _put_away(self, part: _Part) -> None:
        if part.resident:
            keep = part.changed and not part.scratch
            part.store.put_away(keep)
            self._moved["out"] += part.store.nbytes if keep else 0
            part.resident = part.changed = False

    def _bring_back(self, part: _Part) -> None:
        if not part.resident:
            part.store.bring_back()
            if part.role in SCRATCH - CACHES:  # a phase writes every number
                part.store.fill()
            part.resident = True
            self._moved["in"] += 0 if part.scratch else part.store.nbytes

    def _count(self, start: float) -> None:
        """Book the time and bytes since `start`."""
        self._seconds += time.perf_counter() - start
        self._resident[self._phase] = max(self._resident.get(self._phase, 0), sum(self.resident().values()))


def _role(name: str) -> str:
    return name.partition(".")[0]
