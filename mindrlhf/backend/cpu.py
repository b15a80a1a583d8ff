"""CPU: fused operators in C++ if they can be built, else composed ones."""

from typing import TYPE_CHECKING

from mindrlhf.backend import native
from mindrlhf.backend.device import SOCKETS, Device
from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindrlhf.backend.operators import Operators

LACKS_BFLOAT16 = "this processor has neither AVX512_BF16 nor AMX"


class _Cpu(Device):
    def operators(self, dtype: str = "float32", weights: str = "train") -> "Operators":
        from mindrlhf.backend.native.operators import open_operators
        from mindrlhf.backend.operators import ComposedOperators

        decoded = dtype if weights == "train" else weights
        return open_operators(dtype, decoded, weights != "train") or ComposedOperators(weights=decoded)

    def fused_problem(self) -> str:
        return native.library().problem

    def describe_operators(self) -> str:
        built = native.library()
        if built.path:
            lacks = "" if built.bfloat16 else f"; float32 products alone: {LACKS_BFLOAT16}"
            return f"fused attention and feed-forward halves{lacks}"
        return f"MindSpore's, several times slower than fused ones: {built.problem}"

    def is_attached(self) -> bool:
        return True

    def product_dtype(self, dtype: str) -> str:
        built = native.library() if dtype in ("auto", "bfloat16") else None
        if dtype == "auto":
            return "bfloat16" if built.bfloat16 else "float32"
        if built and not built.bfloat16:
            lacks = built.problem or LACKS_BFLOAT16
            raise UserError(f"CPU has no fast bfloat16 products here ({lacks}); set float32 or auto")
        return dtype


CPU = _Cpu(
    name="CPU",
    in_host_memory=True,
    swap="file",
    collectives=SOCKETS,
    product_dtypes=("float32", "bfloat16"),
    activation_dtype="float32",
    ceiling_size=1024,
)
