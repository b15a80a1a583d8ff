"""Kernels on MindSpore's CPU backend: compositions of basic operators, float32 only.

The fused operators of Ascend (RmsNorm, Swiglu, RotaryPositionEmbedding) do not exist on CPU, and bfloat16 has no
matrix product there.
"""

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
from mindrlhf.backend.comm.broadcast import expand


def rms_norm(x, weight, eps):
    """Compute x * weight / sqrt(mean(x^2) + eps) over the last axis.

    Source: Zhang & Sennrich 2019, eq. 4. Shape and dtype are those of x.
    """
    scale = ops.rsqrt(ops.ReduceMean(True)(ops.square(x), -1) + eps)
    return x * expand(scale, x.shape) * expand(weight, x.shape)


def rotary(x, cos, sin):
    """Rotate the pairs (i, i + d/2) by position (Su et al. 2021).

    x: [1, T, heads, d]; cos, sin: [1, T, 1, d], the angles of the d/2 frequencies written twice.
    """
    half = x.shape[-1] // 2
    rotated = ops.concat((-x[..., half:], x[..., :half]), -1)
    return x * expand(cos, x.shape) + rotated * expand(sin, x.shape)


def swiglu(gate, up):
    """Compute silu(gate) * up (Shazeer 2020, eq. 5)."""
    return ops.silu(gate) * up
