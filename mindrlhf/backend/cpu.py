"""Kernels composed of MindSpore's basic operators.

The fused operators of Ascend (RmsNorm, Swiglu, RotaryPositionEmbedding) do not exist on CPU, and bfloat16 has no
matrix product there. Attention scores and softmax are float32.

Symbols: N prompts, G samples of each, P prefix positions, R completion positions, K key-value heads (on this rank),
Q query heads per key-value head, D head_dim.
"""

import numpy as np
from mindspore import Tensor, ops

from mindrlhf.backend.comm.broadcast import expand

# Added to masked scores: far below any real score, but far from float32's limit, so that sums stay finite.
MASKED = -1e30


def linear(x, weight):
    """Multiply x [T, in] by weight [out, in] to [T, out], in x's dtype."""
    return ops.MatMul(transpose_b=True)(x, weight.astype(x.dtype))


def linear_bias(x, weight, bias):
    """Multiply x [T, in] by weight [out, in] and add bias [out]."""
    y = linear(x, weight)
    return y + expand(bias.astype(y.dtype), y.shape)


def group_view(prefix_lengths, lengths, split, key_heads, query_heads):
    """Build the masks of `group_attention`, once for all layers.

    prefix_lengths: int32[N]; lengths: int32[N*G], completion lengths, for operators that skip padding; split: (N, P, G,
    R), with G = 0 for prompts only.
    """
    _, p, g, r = split
    queries = query_heads // key_heads
    if g == 0:
        return (causal_mask(p, queries),)
    return causal_mask(p, queries), causal_mask(r, queries), key_mask(prefix_lengths, p)


def group_attention(query, key, value, view, split, scale):
    """Attend causally within prompts, and from completions to their shared prompt and themselves.

    query: [T, K * Q, D] for T = N*P + N*G*R tokens, prompts first, or for the completion tokens only; key, value: [T,
    K, D]; view: from `group_view`. Returns [query rows, K * Q * D]. Within prompts, right padding needs no extra mask:
    a real position never looks ahead, and nothing reads the padded positions.
    """
    n, p, g, r = split
    heads, d = key.shape[1:]
    far = n * p
    far_shape, near_shape = (n, p, heads, d), (n, g, r, heads, d)
    far_q_shape, near_q_shape = (n, p, heads, -1, d), (n, g, r, heads, -1, d)
    far_k, far_v = key[:far].reshape(far_shape), value[:far].reshape(far_shape)
    if g == 0:
        return prefix_attention(query.reshape(far_q_shape), far_k, far_v, view[0], scale).reshape((far, -1))
    rows = n * g * r
    near_q = query[query.shape[0] - rows :].reshape(near_q_shape)
    near_k, near_v = key[far:].reshape(near_shape), value[far:].reshape(near_shape)
    near = completion_attention(near_q, near_k, near_v, far_k, far_v, view[1], view[2], scale).reshape((rows, -1))
    if query.shape[0] == rows:
        return near
    out = prefix_attention(query[:far].reshape(far_q_shape), far_k, far_v, view[0], scale)
    return ops.concat((out.reshape((far, -1)), near))


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


def decode_view(positions, heads, size):
    """Build cache positions and mask of `decode_attention`, once for all layers.

    positions: int32[B], of the new tokens; heads, size: K and S of the caches.
    """
    b = positions.shape[0]
    slots = ops.arange(0, b * heads).astype("int32").reshape((b * heads, 1))
    places = ops.tile(positions.reshape((b, 1)), (1, heads)).reshape((b * heads, 1))
    return ops.concat((slots // heads, slots % heads, places), 1), key_mask(positions + 1, size)


def decode_attention(query, key, value, key_cache, value_cache, view, scale):
    """Write one new position of each slot into the caches, and attend.

    query: [B, K * Q, D]; key, value: [B, K, D]; key_cache, value_cache: Parameters [B, K, S, D]; view: from
    `decode_view`. Returns [B, K * Q * D].
    """
    places, mask = view
    (b, s), heads, d = mask.shape, key.shape[1], query.shape[-1]
    put = ops.ScatterNdUpdate()
    key_cache = put(key_cache, places, key.reshape((-1, d)))
    value_cache = put(value_cache, places, value.reshape((-1, d)))
    query = query.reshape((b, heads, -1, d))
    scores = ops.BatchMatMul(transpose_b=True)(query * scale, key_cache).astype("float32")
    weights = ops.softmax(scores + expand(mask.reshape((b, 1, 1, s)), scores.shape), -1)
    return ops.BatchMatMul()(weights.astype(value_cache.dtype), value_cache).reshape((b, -1))


def rms_norm(x, weight, eps):
    """Compute x * weight / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019, eq. 4)."""
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


def squared_norm(gradients):
    """Sum the squares of all gradients to a float32 scalar."""
    parts = ()
    for gradient in gradients:
        parts += (ops.square(gradient).sum(),)
    return ops.stack(parts).sum()


def adamw(parameters, gradients, first, second, decays, rows, numbers):
    """Update all parameters and moments in place; zero the gradients.

    decays: for each parameter, True if weight decay applies. rows: (first, end) of the rows of each gradient that
    belong to the parameter. numbers: six float32 scalars: rate, beta1, beta2, epsilon, decay, and the factor of the
    gradients. The update is w -= rate * (m / (sqrt(v) + epsilon) + decay * w), without bias correction of the moments.
    """
    rate, beta1, beta2, eps, decay, scale = numbers
    done = rate
    for i in range(len(parameters)):
        gradient = gradients[i]
        start, end = rows[i]
        own = gradient if end - start == gradient.shape[0] else gradient[start:end]
        given = rate, beta1, beta2, eps, decay if decays[i] else decay * 0.0, own * scale
        step = ops.AdamWeightDecay()(parameters[i], first[i], second[i], *given)
        done = ops.depend(done, step)
        # g - g instead of zeros, which would become constants of the graph and take the model's size in memory again.
        # The gradients are finite here.
        done = ops.depend(done, ops.assign_sub(gradient, ops.depend(gradient, step)))
    return done
