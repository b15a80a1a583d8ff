"""The functions that a graph is built from, as fused operators (`kernels.cpp`), with their gradients; float32.

They have the shapes and the meaning of those in `backend.cpu` and `backend.attention`. Operators take tensors only, so
numbers (scales, dimensions) are constants of the graph.

A row of a result is computed by one thread, and always in the same order: results do not depend on the threads.
"""

import functools

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.dtype import float32, int32
from mindspore.ops import constexpr

from mindrlhf.backend.native import library


class Operators:
    """What `kernels.cpp` at `path` has, by name. Shapes and dtypes are functions of those of the inputs."""

    COMPUTE_DTYPES = ("float32",)

    def __init__(self, path: str):
        def operator(name, shapes, dtypes=lambda *inputs: inputs[0]):
            return ops.Custom(f"{path}:{name}", out_shape=shapes, out_dtype=dtypes, func_type="aot")

        def two(first, *_):
            return first, first

        def three(first, *_):
            return first, first, first

        to_input = operator("linear_input_gradient", lambda dy, w: [dy[0], w[1]])
        to_weight = operator("linear_weight_gradient", lambda dy, x: [dy[1], x[1]])
        self.linear = _Linear(operator("linear", lambda x, w: [x[0], w[0]]), to_input, to_weight)
        self.linear_bias = _LinearBias(
            operator("linear_bias", lambda x, w, b: [x[0], w[0]]),
            to_input,
            to_weight,
            operator("bias_gradient", lambda dy: [dy[1]]),
        )
        self._rms_norm = _RmsNorm(
            operator("rms_norm", lambda x, w, eps: x),
            operator("rms_norm_gradient", lambda dy, x, w, eps: (x, w), two),
        )
        self._rotary = _Rotary(operator("rotary", lambda x, cos, sin, sign: x))
        self.swiglu = _Swiglu(
            operator("swiglu", lambda gate, up: gate), operator("swiglu_gradient", lambda dy, gate, up: (gate, up), two)
        )
        self._attention = _Attention(
            operator("attention", lambda q, k, v, lengths, dims, scale: q),
            operator("attention_gradient", lambda q, k, v, lengths, dims, scale, dy: (q, k, v), three),
        )
        every = _several_dtypes(8), _several_dtypes(6)
        self._whole = operator("layer", _layer_shapes, every[0])
        gradient = operator("layer_gradient", _layer_gradient_shapes, every[1])
        self._collecting, self._recomputing = (_Layer(self._whole, gradient, again) for again in (False, True))
        self._decode = operator("decode_attention", lambda q, k, v, positions, keys, values, scale: q)
        self._layer = operator("decode_layer", lambda x, *_: x)
        self._tokens = operator(
            "decode_tokens",
            lambda *inputs: (inputs[7],) * 3,  # of the uniform numbers
            lambda *_: (int32, float32, float32),
        )
        self._admit = operator("admit", lambda *_: [1], lambda *_: float32)
        self._squared_norm = operator("squared_norm", lambda *_: [1])
        self._adamw = operator("adamw", lambda *_: [1])
        self.token_log_probs = operator(
            "token_log_probs",
            lambda hidden, head, *_: (*([hidden[0]],) * 3, [hidden[0], head[0]]),
            _several_dtypes(4),
        )
        self.token_log_probs_gradient = operator(
            "token_log_probs_gradient", lambda hidden, head, *_: (hidden, head), _several_dtypes(2)
        )

    def rms_norm(self, x, weight, eps):
        return self._rms_norm(x, weight, number(eps))

    def rotary(self, x, cos, sin):
        return self._rotary(x, cos, sin)

    def group_view(self, prefix_lengths, lengths, split, key_heads, query_heads):
        return prefix_lengths if split[2] == 0 else ops.concat((prefix_lengths, lengths))

    def group_attention(self, query, key, value, view, split, scale):
        _, p, g, r = split
        heads, d = key.shape[1:]
        asked = 1 if query.shape[0] == key.shape[0] else 0
        dims = whole_numbers((p, g, r, heads, d, asked))
        width = query.shape[1] * d
        q, k, v = query.reshape((-1, width)), key.reshape((-1, heads * d)), value.reshape((-1, heads * d))
        return self._attention(q, k, v, view, dims, number(scale))

    def layer(self, x, weights, cos, sin, asking, view, dims, numbers, collected=None, again=False):
        """One layer over all rows, as `models.transformer.Block` computes it; padding is left out, and 0 in the output.

        x: [T, hidden]; weights: as `Block.decode_weights` gives them, without the norms of query and key; cos, sin:
        [1, T, 1, D]; asking: those of the last rows, which are wanted, [1, near, 1, D]; view: as in `group_attention`;
        dims: prefix positions, samples, completion positions, key heads, D, and 1 if all rows are wanted; numbers:
        scale, epsilon, has_bias. collected: a buffer for each weight and the trigger of `models.weight`; without them
        it has no gradient. again: whether going back keeps x alone and computes the rest again.

        Returns the output [near, hidden], queries [near, H * D], keys and values [T, K * D], and more; but for the
        output, without gaps where padding is.
        """
        places = (cos, sin, asking, view, whole_numbers(dims), several(*numbers))
        if collected is None:
            return self._whole(x, *weights, *places)
        return (self._recomputing if again else self._collecting)(x, weights, places, *collected)

    def decode_view(self, positions, heads, size):
        return positions

    def decode_attention(self, query, key, value, key_cache, value_cache, view, scale):
        b = query.shape[0]
        q, k, v = query.reshape((b, -1)), key.reshape((b, -1)), value.reshape((b, -1))
        return self._decode(q, k, v, view, key_cache, value_cache, number(scale))

    def admit(self, slots, rows, limit, prefilled, caches):
        """Row `rows[i]` of each of `prefilled` [N, K, P, D] into slot `slots[i]` of its cache [B, K, S, D]; int32[A]
        each. What lies behind the first `limit` positions stays.
        """
        return self._admit(slots, rows, whole_numbers((limit,)), *prefilled, *caches)

    def decode_layer(self, x, weights, cos, sin, view, key_cache, value_cache, scale, eps, has_bias, has_norms):
        """One layer for one new position of each slot, as `models.transformer.Block` computes it.

        x: [B, hidden]; weights: as `Block.decode_weights` gives them; cos, sin: [1, B, 1, D]; view, key_cache,
        value_cache: as in `decode_attention`. Returns [B, hidden].
        """
        numbers = several(scale, eps, has_bias, has_norms)
        return self._layer(x, cos, sin, view, numbers, *weights, key_cache, value_cache)

    def decode_tokens(self, slots, uniform, stop_ids, table, angles, norm, head, layers, numbers):
        """Up to n tokens of each slot, as `models.transformer.Decoder` and `rollout.sampling.Sampler` give them one by
        one; a slot that draws a stop token is left out from there on.

        slots: int32[B] each: the last token, its position, how many tokens may still come (0: nothing in this slot), in
        how many of them no stop token may, the slot that keeps the prompt, and how many positions of it; and int32[2]:
        with how many slots going on no further token is begun, and where behind the longest prompt a slot keeps what it
        has of its own. uniform: [B, n]; stop_ids: int32[s], -1 for none; table: of embeddings [V, hidden]; angles:
        tables of cos and sin [positions, D]; norm, head: the final norm's weight and [V, hidden]; layers:
        `Block.decode_weights` of each, and its caches, all in one row. numbers: scale, epsilon, has_bias and has_norms
        as in `decode_layer`, the inverse temperature, and whether the largest logit is taken.

        Returns token int32[B, n] (-1 where there is none), behaviour and policy log-probs [B, n].
        """
        return self._tokens(*slots, uniform, stop_ids, table, *angles, norm, head, several(*numbers), *layers)

    def squared_norm(self, gradients):
        return self._squared_norm(*gradients).reshape(())

    def adamw(self, parameters, gradients, first, second, decays, rows, numbers):
        # No loop over parameters: MindSpore would infer as many tuples as there are, each longer than the one before.
        return self._adamw(ops.stack(numbers), update_layout(rows, decays), *parameters, *first, *second, *gradients)


@functools.cache
def operators() -> Operators | None:
    """None where they could not be built."""
    path = library().path
    return Operators(str(path)) if path else None


@constexpr
def number(value):
    return Tensor(np.array([value], np.float32))


@constexpr
def several(*values):
    return Tensor(np.array(values, np.float32))


@constexpr
def whole_numbers(values):
    return Tensor(np.array(values, np.int32))


@constexpr
def update_layout(rows, decays):
    """int32[2 * n]: of each parameter the first of its rows, and whether it decays."""
    return Tensor(np.array([(first, decay) for (first, _), decay in zip(rows, decays, strict=True)], np.int32).ravel())


class _Linear(nn.Cell):
    def __init__(self, forward, to_input, to_weight):
        super().__init__(auto_prefix=False)
        self.forward, self.to_input, self.to_weight = forward, to_input, to_weight

    def construct(self, x, weight):
        return self.forward(x, weight)

    def bprop(self, x, weight, out, d_out):
        return self.to_input(d_out, weight), self.to_weight(d_out, x)


class _LinearBias(nn.Cell):
    def __init__(self, forward, to_input, to_weight, to_bias):
        super().__init__(auto_prefix=False)
        self.forward, self.to_input, self.to_weight, self.to_bias = forward, to_input, to_weight, to_bias

    def construct(self, x, weight, bias):
        return self.forward(x, weight, bias)

    def bprop(self, x, weight, bias, out, d_out):
        return self.to_input(d_out, weight), self.to_weight(d_out, x), self.to_bias(d_out)


class _RmsNorm(nn.Cell):
    def __init__(self, forward, gradient):
        super().__init__(auto_prefix=False)
        self.forward, self.gradient = forward, gradient

    def construct(self, x, weight, eps):
        return self.forward(x, weight, eps)

    def bprop(self, x, weight, eps, out, d_out):
        d_x, d_weight = self.gradient(d_out, x, weight, eps)
        return d_x, d_weight, eps


class _Rotary(nn.Cell):
    def __init__(self, turn):
        super().__init__(auto_prefix=False)
        self.turn = turn

    def construct(self, x, cos, sin):
        return self.turn(x, cos, sin, number(1.0))

    def bprop(self, x, cos, sin, out, d_out):
        return self.turn(d_out, cos, sin, number(-1.0)), cos, sin


class _Swiglu(nn.Cell):
    def __init__(self, forward, gradient):
        super().__init__(auto_prefix=False)
        self.forward, self.gradient = forward, gradient

    def construct(self, gate, up):
        return self.forward(gate, up)

    def bprop(self, gate, up, out, d_out):
        return self.gradient(d_out, gate, up)


class _Layer(nn.Cell):
    """Its weights' gradients are added to the buffers; nothing before x gets one before that is done.

    again: whether the layer is computed once more when its gradient is asked for, so that only x is kept until then
    (Chen et al. 2016, arXiv:1604.06174).
    """

    def __init__(self, forward, gradient, again):
        super().__init__(auto_prefix=False)
        self.forward, self.gradient, self.again = forward, gradient, again

    def construct(self, x, weights, places, buffers, trigger):
        return self.forward(x, *weights, *places)

    def bprop(self, x, weights, places, buffers, trigger, out, d_out):
        if self.again:
            x = ops.depend(x, d_out[0])  # not before: nor is it the same as the first time, for the compiler
            out = self.forward(x, *weights, *places)
        d_x = self.gradient(x, *weights, *places, *out[1:], d_out[0], *buffers)[0]
        return d_x, weights, places, buffers, ops.depend(trigger, d_x)


def _several_dtypes(count: int):
    return lambda x, *_: (x,) * count


def _layer_shapes(x, norm, wq, wk, wv, bq, bk, bv, wo, ffn, w1, w3, w2, cos, sin, asking, *_):
    rows, near, (hidden, width, key_width, inner) = x[0], asking[1], (x[1], wq[0], wk[0], w1[0])
    query, key = [near, width], [rows, key_width]
    return [near, hidden], query, key, key, query, [near, hidden], [near, inner], [near, inner]


def _layer_gradient_shapes(*inputs):
    _, query, key, value, _, total, gate, _ = _layer_shapes(*inputs)
    between = [gate[0], max(gate[1], query[1])]  # holds the gates' product, and the gradient of the queries later
    return inputs[0], inputs[0], key, value, total, between


class _Attention(nn.Cell):
    def __init__(self, forward, gradient):
        super().__init__(auto_prefix=False)
        self.forward, self.gradient = forward, gradient

    def construct(self, query, key, value, lengths, dims, scale):
        return self.forward(query, key, value, lengths, dims, scale)

    def bprop(self, query, key, value, lengths, dims, scale, out, d_out):
        d_query, d_key, d_value = self.gradient(query, key, value, lengths, dims, scale, d_out)
        return d_query, d_key, d_value, lengths, dims, scale
