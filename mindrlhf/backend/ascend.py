"""Kernels on Ascend: the fused operators, by their documented API; untested on a device."""

from mindspore import ops

from mindrlhf.backend.adamw import adamw, squared_norm  # noqa: F401
from mindrlhf.backend.attention import (  # noqa: F401
    decode_attention,
    decode_view,
    group_attention,
    group_view,
    linear,
    linear_bias,
)


def rms_norm(x, weight, eps):
    """Normalise by the RMS of the last axis, fused."""
    return ops.rms_norm(x, weight.astype(x.dtype), eps)[0]


def rotary(x, cos, sin):
    """Rotate halves by position, fused: mode 0 with layout BSND and 1S1D.

    x: [1, T, heads, d]; cos, sin: [1, T, 1, d].
    """
    return ops.rotary_position_embedding(x, cos.astype(x.dtype), sin.astype(x.dtype), 0)


def swiglu(gate, up):
    """Compute silu(gate) * up, fused."""
    return ops.swiglu(ops.concat((gate, up), -1), -1)
