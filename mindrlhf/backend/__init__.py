"""All differences between device targets: kernels, collectives, memory, process start.

`kernels(target)` gives the functions that a graph is built from. Everything above this room is the same code on a
laptop's CPU and on Ascend.
"""

from mindrlhf.backend.parameter_memory import read, read_all, rewriting, write  # noqa: F401
from mindrlhf.errors import UserError

TARGETS = ("CPU", "Ascend")


def kernels(target: str):
    """What graphs are built from on a `context.device_target`: `rms_norm`, `rotary`, `group_attention`, ...

    On CPU these are fused operators where they can be built (`backend.native`), and compositions elsewhere.
    """
    if target == "CPU":
        from mindrlhf.backend import cpu
        from mindrlhf.backend.native.operators import operators

        return operators() or cpu
    if target == "Ascend":
        from mindrlhf.backend import ascend

        return ascend
    raise UserError(f"context.device_target is {target!r}; this suite runs on {' and '.join(TARGETS)}.")


def operators_in_use(target: str) -> str:
    """Which operators `kernels` gives there, for people."""
    if target != "CPU":
        return "MindSpore's fused ones"
    from mindrlhf.backend.native import library

    built = library()
    return "fused" if built.path else f"MindSpore's, several times slower than fused ones: {built.problem}"
