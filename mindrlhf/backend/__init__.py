"""Differences between device targets: kernels, collectives, memory, process start.

All other rooms are the same code on a laptop's CPU and on Ascend.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mindrlhf.backend.parameter_memory import read, read_all, rewriting, write  # noqa: F401


@dataclass(frozen=True)
class Kernels:
    """Operators that graphs are built from on a device target.

    composed: a module with all of them, made of MindSpore's. fused: the C++ operators (`backend.native`), or None.
    """

    composed: ModuleType
    fused: Any = None

    @property
    def best(self) -> Any:
        """Fused operators if available, for functions that both have."""
        return self.fused or self.composed


def kernels(target: str) -> Kernels:
    """Return the kernels of a `context.device_target`."""
    if target == "CPU":
        from mindrlhf.backend import cpu
        from mindrlhf.backend.native.operators import operators

        return Kernels(cpu, operators())
    from mindrlhf.backend import ascend

    return Kernels(ascend)


def operators_in_use(target: str) -> str:
    """Describe the operators of `kernels` for people."""
    if target != "CPU":
        return "MindSpore's fused ones"
    from mindrlhf.backend.native import library

    built = library()
    if built.path:
        return "fused attention and feed-forward halves"
    return f"MindSpore's, several times slower than fused ones: {built.problem}"
