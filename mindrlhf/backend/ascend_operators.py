"""Operators on Ascend, not run on a device.

They are fused where the documented API has them.
"""

from dataclasses import dataclass

from mindspore import ops

from mindrlhf.backend.operators import Operators


@dataclass(frozen=True)
class AscendOperators(Operators):
    """Norm, rotation and gated product of MindSpore, and composed forms of the others."""

    activations: str = "float32"
    weights: str = "float32"

    @staticmethod
    def rms_norm(x, weight, eps):
        return ops.rms_norm(x, weight.astype(x.dtype), eps)[0]

    @staticmethod
    def rotary(x, cos, sin):
        """Rotate halves by position: mode 0 with layout BSND and 1S1D."""
        return ops.rotary_position_embedding(x, cos.astype(x.dtype), sin.astype(x.dtype), 0)

    @staticmethod
    def swiglu(gate, up):
        return ops.swiglu(ops.concat((gate, up), -1), -1)
