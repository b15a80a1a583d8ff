"""The fused operators (`kernels.cpp`) as MindSpore operators, with their gradients.

All arrays are float32. Matrix products take float32 inputs, or round them to bfloat16 and sum in float32; products of
attention, and all computation between products, are always float32.

Operators take only tensors, so numbers (scales, sizes) are constant tensors of the graph. Weights that a model does not
have are omitted. `names.h` has the names of numbers and weights.

One thread computes a row of a result, always in the same order: results do not depend on the threads.
"""

import functools

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.dtype import float32, int32
from mindspore.ops import constexpr

from mindrlhf.backend.native import library, names

ATTENTION_WEIGHTS, FEED_FORWARD_WEIGHTS = names.members("AttentionWeights"), names.members("FeedForwardWeights")


class Operators:
    """Operators of the library at `path`.

    dtype: input dtype of products, float32 or bfloat16; weights: dtype in decode steps, one of these or int8. Shapes
    and dtypes of results are functions of the inputs' shapes and dtypes.
    """

    def __init__(self, path: str, dtype: str = "float32", weights: str = "float32"):
        self.weights = weights

        def operator(name, shapes, dtypes=lambda *inputs: inputs[0]):
            return ops.Custom(f"{path}:{name}", out_shape=shapes, out_dtype=dtypes, func_type="aot")

        def products(name, *results, dtype=dtype):
            return operator(name if dtype == "float32" else f"{name}_{dtype}", *results)

        decoding = functools.partial(products, dtype=weights)

        self.linear = products("linear", lambda x, w: [x[0], w[0]])
        self._rms_norm = _RmsNorm(
            operator("rms_norm", lambda x, w, eps: x),
            operator("rms_norm_gradient", lambda dy, x, w, eps: (x, w), lambda dy, *_: (dy, dy)),
        )
        halves = (
            ("attention", _attention_shapes, _attention_gradient_shapes, slice(1, 5), 6, 7),
            ("feed_forward", _feed_forward_shapes, _feed_forward_gradient_shapes, slice(1, 3), 3, 4),
        )
        self._halves = {
            (name, again): _Half(
                products(f"{name}_half", shapes, _float32s(outputs)),
                products(f"{name}_half_gradient", gradients, _float32s(between)),
                kept,
                again,
            )
            for name, shapes, gradients, kept, outputs, between in halves
            for again in (False, True)
        }
        self._decode_attention = decoding("decode_attention_half", lambda x, *_: x)
        self._decode_feed_forward = decoding("decode_feed_forward_half", lambda x, *_: x)
        self.decode_logits = decoding("decode_logits", lambda x, head: [x[0], head[0]])
        self._tokens = decoding(
            "decode_tokens",
            lambda *inputs: (*(inputs[8],) * 3, [3]),  # shapes of the context
            lambda *_: (int32, float32, float32, int32),
        )
        self._admit = operator("admit", lambda *_: [1], lambda *_: float32)
        self._squared_norm = operator("squared_norm", lambda *_: [1])
        self._adamw = operator("adamw", lambda *_: [1])
        self._shared_sum = operator("shared_sum", lambda x, ranks: x)
        # Without it, independent sums would run in any order, and ranks that begin different sums would wait forever.
        self._shared_sum.add_prim_attr("side_effect_io", True)
        self.token_log_probs = products(
            "token_log_probs",
            lambda hidden, head, *_: (*([hidden[0]],) * 3, [hidden[0], head[0]]),
            _float32s(4),
        )
        self.token_log_probs_gradient = products("token_log_probs_gradient", lambda hidden, *_: hidden)

    def shared_sum(self, group) -> "_SharedSum":
        """Return a sum over ranks that share memory (`comm.shared_memory`)."""
        return _SharedSum(self._shared_sum, group)

    def rms_norm(self, x, weight, eps):
        return self._rms_norm(x, weight, numbers_of("NormNumbers", (("epsilon", eps),)))

    def half(self, name: str, recompute: bool) -> "_Half":
        """Return a half of a layer, "attention" or "feed_forward".

        recompute: see `_Half`.
        """
        return self._halves[name, recompute]

    def decode_attention(self, x, weights, positions, numbers, key_cache, value_cache):
        """Run the attention half for one new position of each slot.

        Keys and values are written to the caches.
        x: [B, hidden]; weights: the model's weights among `ATTENTION_WEIGHTS`; positions: tables of cos and sin
        [positions, D], places in the cache int32[B], and rows of the tables int32[B]; numbers: of `HalfNumbers`;
        caches: [B, K, S, D]. Returns [B, hidden].
        """
        numbers = numbers_of("HalfNumbers", numbers)
        return self._decode_attention(x, *positions, numbers, key_cache, value_cache, *weights)

    def decode_feed_forward(self, x, weights, numbers):
        """Run the feed-forward half for one new position of each slot.

        The map is [B, hidden] -> [B, hidden].
        """
        return self._decode_feed_forward(x, numbers_of("HalfNumbers", numbers), *weights)

    def admit(self, slots, rows, limit, prefilled, caches):
        """Copy row `rows[i]` of prefilled caches to slot `slots[i]`, int32[A] each.

        `prefilled` are [N, K, P, D], the caches [B, K, S, D]. Content after the first `limit` positions stays.
        """
        return self._admit(slots, rows, numbers_of("AdmitNumbers", (("limit", limit),)), *prefilled, *caches)

    def decode_tokens(self, slots, uniform, stop_ids, table, angles, norm, head, layers, given, numbers):
        """Draw up to n tokens of each slot.

        The tokens are the same that `models.decoder.Decoder` and `rollout.sampling.Sampler` draw one by one; a slot
        that has drawn a stop token draws no more.

        slots: int32[B] each: the last token, its place in the cache, its position in the sequence (of its rotary
            angle), the number of tokens still to come (0: an empty slot), the number of next tokens that must not be a
            stop token, the slot that holds the prompt, and the prompt's positions there; int32[3]: the number of active
            slots at which no further token begins, a slot's first position after the longest prompt, and the most
            steps; int32[B, n]: context tokens, which are taken as they are and never end a slot, -1 where a token is
            drawn; and int32[B, h]: texts to search for drafts of the next tokens (see `rollout.drafts`), -1 for none. A
            step draws one token of a slot, plus its draft's.
        uniform: [B, n]; stop_ids: int32[s], -1 for none; table: embeddings [V, hidden].
        angles: tables of cos and sin [positions, D]; norm: the final norm's weight; head: [V, hidden].
        layers: one flat tuple of each layer's attention weights, caches and feed-forward weights.
        given: for each half the bits of its weights, as in `HalfNumbers`. numbers: of `DecodeNumbers`.

        Returns tokens int32[B, n] (-1 for none), behaviour and policy log-probs [B, n] (0 without a draw), and
        int32[3]: steps, draft tokens, and accepted draft tokens. Drafts change no token and no log-prob.
        """
        fixed = (table, *angles, norm, head, numbers_of("DecodeNumbers", numbers), integers(given))
        return self._tokens(*slots, uniform, stop_ids, *fixed, *layers)

    def squared_norm(self, gradients):
        return self._squared_norm(*gradients).reshape(())

    def adamw(self, parameters, gradients, first, second, decays, rows, numbers):
        # No loop over parameters: MindSpore would infer one tuple for each, and each is longer than the one before.
        return self._adamw(ops.stack(numbers), update_layout(rows, decays), *parameters, *first, *second, *gradients)


@functools.cache
def operators(dtype: str = "float32", weights: str | None = None) -> Operators | None:
    """Open the built operators; None if they could not be built.

    dtype, weights: see `Operators`; `weights` is `dtype` by default.
    """
    path = library().path
    return Operators(str(path), dtype, weights or dtype) if path else None


@constexpr
def numbers_of(struct, values):
    """Make a constant tensor of a struct of `names.h`.

    values: pairs of a member's name and its value.
    """
    return Tensor(names.filled(struct, dict(values)))


@constexpr
def integers(values):
    """Make a constant tensor int32[n]."""
    return Tensor(np.array(values, np.int32))


@constexpr
def update_layout(rows, decays):
    """Describe parameters as int32[2 * n]: first row, and 1 for weight decay."""
    return Tensor(np.array([(first, decay) for (first, _), decay in zip(rows, decays, strict=True)], np.int32).ravel())


class _RmsNorm(nn.Cell):
    def __init__(self, forward, gradient):
        super().__init__(auto_prefix=False)
        self.forward, self.gradient = forward, gradient

    def construct(self, x, weight, eps):
        return self.forward(x, weight, eps)

    def bprop(self, x, weight, eps, out, d_out):
        d_x, d_weight = self.gradient(d_out, x, weight, eps)
        return d_x, d_weight, eps


class _SharedSum(nn.Cell):
    """Sum over a group's ranks, forward and backward: float32[...] -> [...]."""

    def __init__(self, operator, group):
        super().__init__(auto_prefix=False)
        self.operator, self.group = operator, Tensor(np.array(group, np.int32))

    def construct(self, x):
        return self.operator(x, self.group)

    def bprop(self, x, out, d_out):
        return (self.operator(d_out, self.group),)


class _Half(nn.Cell):
    """Half of a layer over all rows; padding gives 0.

    x: [T, hidden]; places: the operator's other inputs, `HalfNumbers` last; weights: the weights of `ATTENTION_WEIGHTS`
    or `FEED_FORWARD_WEIGHTS` whose bits the numbers set; buffers: likewise, for their gradients; trigger: of
    `models.weight`. The weights get their gradients before anything that x depends on. `forward` alone has no gradient.

    Returns the half's output and intermediate arrays. recompute: only x is kept, and the backward pass computes the
    half again (Chen et al. 2016, arXiv:1604.06174).
    """

    def __init__(self, forward, gradient, kept: slice, recompute: bool):
        super().__init__(auto_prefix=False)
        self.forward, self.gradient, self.recompute = forward, gradient, recompute
        self.first_kept, self.end_kept = kept.start, kept.stop

    def construct(self, x, places, weights, buffers, trigger):
        for buffer in buffers:  # the compiler may replace arrays that are not used in the forward pass
            x = ops.depend(x, buffer)  # one by one: a tuple of them would be copied
        return self.forward(x, *places, *weights)

    def bprop(self, x, places, weights, buffers, trigger, out, d_out):
        if self.recompute:
            x = ops.depend(x, d_out[0])  # so that the compiler neither runs this earlier nor reuses the first result
            out = self.forward(x, *places, *weights)
        kept = out[self.first_kept : self.end_kept]
        d_x = self.gradient(x, *places, *weights, *kept, d_out[0], *buffers)[0]
        return d_x, places, weights, buffers, ops.depend(trigger, d_x)


def _float32s(count: int):
    return lambda *_: (float32,) * count


def _attention_shapes(x, cos, sin, positions, asking, lengths, numbers, norm, wq, wk, *_):
    query, key = [asking[0], wq[0]], [x[0], wk[0]]
    return [asking[0], x[1]], query, key, key, query, key


def _attention_gradient_shapes(*inputs):
    y, query, key, *_ = _attention_shapes(*inputs)
    return inputs[0], inputs[0], query, key, key, key, y


def _feed_forward_shapes(x, lengths, numbers, norm, w1, *_):
    return x, [x[0], w1[0]], [x[0], w1[0]]


def _feed_forward_gradient_shapes(*inputs):
    x, gate, _ = _feed_forward_shapes(*inputs)
    return x, x, gate, x
