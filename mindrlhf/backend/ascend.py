"""Kernels on Ascend, fused where the documented API has them; untested on a device."""

from mindspore import ops

from mindrlhf.backend.cpu import *  # noqa: F403


def rms_norm(x, weight, eps):
    return ops.rms_norm(x, weight.astype(x.dtype), eps)[0]


def rotary(x, cos, sin):
    """Rotate halves by position: mode 0 with layout BSND and 1S1D."""
    return ops.rotary_position_embedding(x, cos.astype(x.dtype), sin.astype(x.dtype), 0)


def swiglu(gate, up):
    return ops.swiglu(ops.concat((gate, up), -1), -1)
