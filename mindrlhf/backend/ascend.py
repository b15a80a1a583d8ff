"""Ascend NPUs; not run on a device."""

from pathlib import Path
from typing import TYPE_CHECKING

from mindrlhf.backend.device import Device, DeviceOptions
from mindrlhf.errors import UserError

if TYPE_CHECKING:
    from mindrlhf.backend.operators import Operators


class _Ascend(Device):
    def operators(self, dtype: str = "float32", weights: str = "train") -> "Operators":
        from mindrlhf.backend.ascend_operators import AscendOperators

        return AscendOperators(dtype, dtype if weights == "train" else weights)

    def is_attached(self) -> bool:
        """Test for an NPU: it appears as /dev/davinciN, also without MindSpore."""
        return any(Path("/dev").glob("davinci[0-9]*"))

    def check_usable(self) -> None:
        from mindspore.device_context import ascend

        if not ascend.is_available():
            found = "context.device_target is Ascend, and there is no NPU with CANN here"
            raise UserError(f"{found}: use --device CPU, or the CPU overlay of the model YAML")

    def configure(self, options: DeviceOptions) -> None:
        import mindspore

        if options.max_device_memory:
            mindspore.runtime.set_memory(max_size=options.max_device_memory)
        if options.jit_level:
            mindspore.set_context(jit_config={"jit_level": options.jit_level})


ASCEND = _Ascend(
    name="Ascend",
    in_host_memory=False,
    swap="host",
    collectives="hccl",
    product_dtypes=("float32", "bfloat16", "float16"),
    activation_dtype=None,
    recomputes=False,
    ceiling_size=8192,
    context_keys=("device_id", "max_device_memory", "jit_level"),
    default_dtypes={
        "train": {"compute_dtype": "bfloat16"},
        "infer": {"compute_dtype": "bfloat16", "param_init_type": "bfloat16"},
    },
    # As npu-smi names them. Of a 910C (910_93, Atlas A3) each of both dies is a device of its own.
    chips={
        "910A": 32,
        "910B1": 64,
        "910B2": 64,
        "910B2C": 64,
        "910B3": 64,
        "910B4": 32,
        "910B4-1": 64,
        "910C": 64,
        "910_93": 64,
        "300I-Pro": 21,
        "300I-Duo": 43,
    },
    default_chip="910B3",
)
