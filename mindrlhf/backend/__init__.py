"""Differences between device targets: kernels, collectives, memory, process start.

All other packages run the same code on a laptop's CPU and on Ascend.
"""

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mindrlhf.backend.parameter_memory import read, read_all, rewriting, write  # noqa: F401
from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindrlhf.configs.base import Device

LACKS_BFLOAT16 = "this processor has neither AVX512_BF16 nor AMX"


@dataclass(frozen=True)
class Kernels:
    """Operators that graphs are built from on a device target.

    composed: module of all operators, built from MindSpore's. fused: the C++ operators (`backend.native`), or None.
    activations: dtype of the arrays between operators. weights: dtype of the weights in decode steps. packs_cache:
    decode steps store keys and values as bfloat16, two in each int32.
    """

    composed: ModuleType
    fused: Any = None
    activations: str = "float32"
    weights: str = "float32"
    packs_cache: bool = False

    @property
    def best(self) -> Any:
        """Fused operators if available, else composed, for functions that both have."""
        return self.fused or self.composed


def kernels(target: str, dtype: str = "float32", weights: str = "train") -> Kernels:
    """Return the kernels of a `context.device_target`.

    dtype: input dtype of matrix products (`product_dtype`). weights: dtype in decode steps, or train (`check_weights`).
    """
    decoded = dtype if weights == "train" else weights
    if target == "CPU":
        from mindrlhf.backend import cpu
        from mindrlhf.backend.native.operators import operators

        fused = operators(dtype, decoded)
        return Kernels(cpu, fused, weights=decoded, packs_cache=bool(fused) and weights != "train")
    from mindrlhf.backend import ascend

    return Kernels(ascend, activations=dtype, weights=decoded)


def check_weights(target: str, weights: str) -> None:
    """Check that decode steps support `rollout.weights` here. Raises UserError."""
    if weights == "train":
        return
    from mindrlhf.backend.native import library

    problem = "" if target == "CPU" else f"{target} has no products of packed weights"
    if problem or (problem := library().problem):
        raise UserError(f"rollout.weights is {weights}, which takes the CPU's fused operators ({problem}); set train.")


def product_dtype(target: str, dtype: str) -> str:
    """Choose the dtype of matrix products; `auto` is bfloat16 if that is fast.

    Raises UserError for bfloat16 on a CPU without fast bfloat16 products.
    """
    if target != "CPU":
        return "bfloat16" if dtype == "auto" else dtype
    from mindrlhf.backend.native import library

    built = library() if dtype in ("auto", "bfloat16") else None
    if dtype == "auto":
        return "bfloat16" if built.bfloat16 else "float32"
    if built and not built.bfloat16:
        lacks = built.problem or LACKS_BFLOAT16
        raise UserError(f"CPU has no fast bfloat16 products here ({lacks}); set float32 or auto")
    return dtype


def default_device() -> "Device":
    """Return `Ascend` on a host with an NPU, else `CPU`.

    An NPU appears as /dev/davinciN, also without MindSpore. Does not import NumPy. Not run on Ascend.
    """
    return "Ascend" if any(Path("/dev").glob("davinci[0-9]*")) else "CPU"


def operators_in_use(target: str) -> str:
    """Describe the operators of `kernels` in a message."""
    if target != "CPU":
        return "MindSpore's fused ones"
    from mindrlhf.backend.native import library

    built = library()
    if built.path:
        lacks = "" if built.bfloat16 else f"; float32 products alone: {LACKS_BFLOAT16}"
        return f"fused attention and feed-forward halves{lacks}"
    return f"MindSpore's, several times slower than fused ones: {built.problem}"
