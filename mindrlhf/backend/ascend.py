"""Ascend NPUs; not run on a device."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mindrlhf.backend.device import AttentionLimits, Chip, Device, DeviceOptions
from mindrlhf.errors import UserError
from mindrlhf.units import MIB

if TYPE_CHECKING:
    from mindrlhf.backend.operators import Operators


BUFFER_MB = 200  # HCCL_BUFFSIZE unless it is set; a group has one to send and one to receive
CUBE = 2 * 16**3  # operations of a core in a cycle: a product of 16 x 16 x 16
HBM = 1.6e12
HCCS = 196e9
PCIE = 32e9  # 4.0 x16

# Cores and frequencies of 910B and 910_93 are those of CANN 8.5 (data/platform_config, cube_core_cnt and cube_freq);
# their memory and links are those of arXiv 2506.12708 for a die of a 910C, and half of the memory's rate for a 910B4.
# 910A: Hot Chips 31 (2019), float16. 300I: the cards' data sheets, float16, for one of the chips of a Duo.
# Names are those of npu-smi. Of a 910C (910_93, Atlas A3) each of both dies is a device of its own.
CHIPS = {
    "910A": Chip(32, 256e12, 1.2e12, 30e9),
    "910B1": Chip(64, 24 * CUBE * 1.85e9, HBM, HCCS),
    "910B2": Chip(64, 24 * CUBE * 1.8e9, HBM, HCCS),
    "910B2C": Chip(64, 24 * CUBE * 1.8e9, HBM, HCCS),
    "910B3": Chip(64, 20 * CUBE * 1.8e9, HBM, HCCS),
    "910B4": Chip(32, 20 * CUBE * 1.5e9, HBM / 2, PCIE),
    "910B4-1": Chip(64, 20 * CUBE * 1.5e9, HBM / 2, PCIE),
    "910C": Chip(64, 24 * CUBE * 1.8e9, HBM, HCCS),
    "910_93": Chip(64, 24 * CUBE * 1.8e9, HBM, HCCS),
    "300I-Pro": Chip(21, 70e12, 0.204e12, PCIE),
    "300I-Duo": Chip(43, 70e12, 0.204e12, PCIE),
}


class _Ascend(Device):
    def operators(self, dtype: str = "float32", weights: str = "train") -> "Operators":
        from mindrlhf.backend.ascend_operators import AscendAttention, AscendOperators

        kind = AscendOperators if dtype == "float32" else AscendAttention  # which takes no float32
        return kind(dtype, dtype if weights == "train" else weights)

    def is_attached(self) -> bool:
        """Test for an NPU: it appears as /dev/davinciN, also without MindSpore."""
        return any(Path("/dev").glob("davinci[0-9]*"))

    def check_usable(self) -> None:
        from mindspore.device_context import ascend

        if not ascend.is_available():
            if os.environ.get("MS_SIMULATION_LEVEL"):
                found = "Ascend is simulated with CANN's libraries, which MindSpore does not find here"
                start = 'docker run --rm -v "$PWD:/work" mindrlhf:ascend bash tools/ascend_dryrun.sh'
                raise UserError(f"{found}: use a container of docker/Dockerfile.ascend, which needs no card ({start})")
            found = "context.device_target is Ascend, and there is no NPU with CANN here"
            raise UserError(f"{found}: use --device CPU, or the CPU overlay of the model YAML")

    def communicator_bytes(self) -> int:
        """Return the bytes of a group's buffers, which HCCL_BUFFSIZE sets."""
        asked = os.environ.get("HCCL_BUFFSIZE", "")
        return 2 * MIB * (int(asked) if asked.isdecimal() else BUFFER_MB)

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
    ceiling_size=8192,
    attention=AttentionLimits(head_dim_multiple=16, most_head_dim=512, scoreless=("bfloat16", "float16")),
    context_keys=("device_id", "max_device_memory", "jit_level"),
    default_dtypes={
        "train": {"compute_dtype": "bfloat16"},
        "infer": {"compute_dtype": "bfloat16", "param_init_type": "bfloat16"},
    },
    chips=CHIPS,
    default_chip="910B3",
    fragmentation=0.05,
)
