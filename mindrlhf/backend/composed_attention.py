"""Masks and attention composed of MindSpore's basic operators; scores and softmax are float32.

Symbols: see `operators`.
"""

import numpy as np
from mindspore import Tensor, ops

from mindrlhf.backend.comm.broadcast import expand

# Added to masked scores: far below any real score, but far from float32's limit, so that sums stay finite.
MASKED = -1e30


def causal_mask(length: int, queries_per_head: int) -> Tensor:
    """Make a causal mask float32[Q*L, L] to add to scores."""
    mask = np.where(np.tril(np.ones((length, length), bool)), 0.0, MASKED).astype(np.float32)
    return Tensor(np.tile(mask, (queries_per_head, 1)))


def key_mask(lengths, size: int):
    """Make a length mask float32[N, size] to add to scores."""
    allowed = ops.arange(0, size).reshape((1, size)) < lengths.reshape((-1, 1))
    numbers = allowed.astype("float32")
    return ops.select(allowed, ops.zeros_like(numbers), ops.full_like(numbers, MASKED))


def prefix_attention(query, key, value, mask, scale):
    """Attend causally within the prompts.

    query: [N, P, K, Q, D]; key, value: [N, P, K, D]; mask: [Q*P, P] from `causal_mask`. Returns [N, P, K, Q, D].
    """
    n, p, k, q, d = query.shape
    query = query.transpose((0, 2, 3, 1, 4)).reshape((n * k, q * p, d))
    key = key.transpose((0, 2, 1, 3)).reshape((n * k, p, d))
    value = value.transpose((0, 2, 1, 3)).reshape((n * k, p, d))
    scores = ops.BatchMatMul(transpose_b=True)(query * scale, key).astype("float32")
    scores = scores + expand(mask, scores.shape)
    out = ops.BatchMatMul()(ops.softmax(scores, -1).astype(value.dtype), value)
    return out.reshape((n, k, q, p, d)).transpose((0, 3, 1, 2, 4))


def completion_attention(query, key, value, prefix_key, prefix_value, mask, prefix_mask, scale):
    """Attend from completions to shared prompt and, causally, themselves, in one softmax.

    query: [N, G, R, K, Q, D]; key, value: [N, G, R, K, D]; prefix_key, prefix_value: [N, P, K, D];
    mask: [Q*R, R] from `causal_mask`; prefix_mask: [N, P] from `key_mask`. Returns [N, G, R, K, Q, D].
    """
    n, g, r, k, q, d = query.shape
    p = prefix_key.shape[1]
    query = query.transpose((0, 3, 1, 4, 2, 5)) * scale  # [N, K, G, Q, R, D]
    key = key.transpose((0, 3, 1, 2, 4)).reshape((n * k * g, r, d))
    value = value.transpose((0, 3, 1, 2, 4)).reshape((n * k * g, r, d))
    prefix_key = prefix_key.transpose((0, 2, 1, 3)).reshape((n * k, p, d))
    prefix_value = prefix_value.transpose((0, 2, 1, 3)).reshape((n * k, p, d))

    far = ops.BatchMatMul(transpose_b=True)(query.reshape((n * k, g * q * r, d)), prefix_key)
    far = far.astype("float32").reshape((n, k * g * q * r, p))
    far = far + expand(prefix_mask.reshape((n, 1, p)), far.shape)
    near = ops.BatchMatMul(transpose_b=True)(query.reshape((n * k * g, q * r, d)), key).astype("float32")
    near = near + expand(mask, near.shape)
    weights = ops.softmax(ops.concat((far.reshape((n * k * g, q * r, p)), near), -1), -1).astype(value.dtype)
    out = ops.BatchMatMul()(weights[..., p:], value).reshape((n * k, g * q * r, d))
    out = out + ops.BatchMatMul()(weights[..., :p].reshape((n * k, g * q * r, p)), prefix_value)
    return out.reshape((n, k, g, q, r, d)).transpose((0, 2, 4, 1, 3, 5))
