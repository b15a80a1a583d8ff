"""Residency of weights, moments, gradients and caches by phase of a step.

A role is a set of parameters that come and go together; a phase declares the roles that it reads and writes
(`mindrlhf.phases`). When a phase begins, roles that it does not need are put away, and then its own are brought back;
the roles of the phase after it, going by the step before, are read ahead meanwhile where the store can. Content is
written out only if it has changed since it was written last; gradients are zero between updates and a cache means
nothing between two generations, so theirs is not kept at all.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from mindrlhf.backend.memory import Store
from mindrlhf.metrics.metric_set import MetricSet
from mindrlhf.phases import CACHE, CRITIC_GRADIENTS, GRADIENTS, PHASES, ROLES, VALIDATION_CACHE
from mindrlhf.units import GIB

# Of moments that come and go together: 256 MiB of each of the two.
BLOCK_NUMBERS = 64 * 2**20

# Roles whose content need not be kept.
SCRATCH = frozenset((CACHE, VALIDATION_CACHE, GRADIENTS, CRITIC_GRADIENTS))
# Of these, the ones of which a phase writes every number; of a cache it may be a few.
FILLED = frozenset((GRADIENTS, CRITIC_GRADIENTS))


def moving_roles(swap: bool, target: str) -> frozenset[str]:
    """List the roles that are swapped.

    On CPU, roles without content to keep are swapped even without `memory.swap`, where releasing them
    costs next to nothing; a device has no such call.
    """
    return ROLES if swap else SCRATCH if target == "CPU" else frozenset()


@dataclass
class _Role:
    store: Store
    nbytes: int
    resident: bool = True
    changed: bool = False  # since its content was kept, or since the parameters were made as zeros


class Residency:
    """Swapping of roles when phases begin.

    open_store: parameters -> where they go (`backend.memory.open_store`). moving: the roles that do, while the others
    stay in memory.
    """

    def __init__(self, open_store: Callable[[Sequence], Store], moving: Collection[str] = ROLES):
        self._open_store, self._moving = open_store, moving
        self._roles: dict[str, _Role] = {}
        self._moved = {"out": 0, "in": 0}
        self._seconds = 0.0
        self._resident: dict[str, int] = {}
        self._phase = ""
        self._followed_by: dict[str, str] = {}  # phase -> the one that came after it last

    def add(self, name: str, parameters: Iterable, zeros: bool = False) -> None:
        """Put parameters under a role, and away until a phase needs them.

        A role may have parts, `role.0` and so on.
        zeros: they are all zero, which needs no file. Raises ValueError for a role that no phase uses.
        """
        parameters = list(parameters)
        if _role(name) not in ROLES:
            raise ValueError(f"no phase needs the role {name}")
        if not parameters or _role(name) not in self._moving:
            return
        if name in self._roles:
            raise ValueError(f"the role {name} has its parameters already")
        store = self._open_store(parameters)
        role = _Role(store, sum(parameter.nbytes for parameter in parameters), changed=not zeros)
        self._roles[name] = role
        self._put_away(name, role)

    def enter(self, phase: str) -> None:
        """Bring a phase's roles into memory and put the others away.

        Raises ValueError for a phase that `PHASES` lacks, which could find its parameters gone.
        """
        if phase not in PHASES:
            raise ValueError(f"PHASES does not say what the phase {phase!r} needs")
        needs = PHASES[phase].needs
        wanted = {*needs.reads, *needs.writes}
        if not wanted:
            return
        start = time.perf_counter()
        self._followed_by[self._phase], self._phase = phase, phase
        for name, role in self._roles.items():
            if role.resident and _role(name) not in wanted:
                self._put_away(name, role)
        for name, role in self._roles.items():
            if _role(name) in wanted:
                self._bring_back(name, role)
            role.changed |= _role(name) in needs.writes
        self._expect_next()
        self._count(start)

    def use(self, part: str) -> None:
        """Have this part of a role in memory, and none of its others.

        Raises ValueError in a phase that does not declare the role's use in parts.
        """
        if _role(part) not in self._moving:
            return
        if self._phase not in PHASES or _role(part) not in PHASES[self._phase].needs.parts:
            raise ValueError(f"the phase {self._phase!r} does not use {_role(part)} in parts")
        start = time.perf_counter()
        for name, role in self._roles.items():
            if role.resident and _role(name) == _role(part) and name != part:
                self._put_away(name, role)
        self._bring_back(part, self._roles[part])
        self._roles[part].changed = True
        self._count(start)

    def resident(self) -> dict[str, int]:
        """Bytes of each role that is in memory now."""
        return {name: role.nbytes for name, role in self._roles.items() if role.resident}

    def report(self, metrics: MetricSet) -> None:
        """Add `swap/*` of this rank since the last call.

        They are bytes moved, seconds, the most bytes of roles in memory in each phase, and the size of each role
        (`swap/role_gb/*`). Nothing is added where only scratch memory comes and goes.
        """
        if all(_role(name) in SCRATCH for name in self._roles):
            return
        for direction, nbytes in self._moved.items():
            metrics.add_total(f"swap/{direction}_gb", nbytes / GIB)
        metrics.add("swap/seconds", self._seconds)
        for phase, nbytes in self._resident.items():
            metrics.add_max(f"swap/resident_gb/{phase}", nbytes / GIB)
        sizes: dict[str, int] = {}
        for name, role in self._roles.items():
            sizes[_role(name)] = sizes.get(_role(name), 0) + role.nbytes
        for name, nbytes in sizes.items():
            metrics.add_max(f"swap/role_gb/{name}", nbytes / GIB)
        self._moved, self._seconds, self._resident = {"out": 0, "in": 0}, 0.0, {}

    def _expect_next(self) -> None:
        """Read ahead the next phase's roles; all parts of a divided role.

        The parts come one soon after another.
        """
        following = self._followed_by.get(self._phase)
        wanted = PHASES[following].needs.roles if following else ()
        for name, role in self._roles.items():
            if not role.resident and _role(name) in wanted and _role(name) not in SCRATCH:
                role.store.expect()

    def _put_away(self, name: str, role: _Role) -> None:
        keep = role.changed and _role(name) not in SCRATCH
        role.store.put_away(keep)
        self._moved["out"] += role.store.nbytes if keep else 0
        role.resident = role.changed = False

    def _bring_back(self, name: str, role: _Role) -> None:
        if not role.resident:
            role.store.bring_back()
            if _role(name) in FILLED:
                role.store.fill()
            role.resident = True
            self._moved["in"] += 0 if _role(name) in SCRATCH else role.store.nbytes

    def _count(self, start: float) -> None:
        """Book the time and bytes since `start`."""
        self._seconds += time.perf_counter() - start
        held = sum(role.nbytes for role in self._roles.values() if role.resident)
        self._resident[self._phase] = max(self._resident.get(self._phase, 0), held)


def _role(name: str) -> str:
    """Find the role of a name, or of a part's name."""
    return name.partition(".")[0]
