"""The fused operators in C++ as MindSpore operators, with their gradients.

All arrays are float32. Matrix products take float32 inputs, or round them to bfloat16 and sum in float32; products of
attention, and all computation between products, are always float32.

Operators take only tensors, so numbers (scales, sizes) are constant tensors of the graph. Weights that a model does not
have are omitted. `names.h` has the names of numbers and weights.

One thread computes a row of a result, always in the same order: results do not depend on the threads.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.common.dtype import float32, int32
from mindspore.ops import constexpr

from mindrlhf.backend.native import library, names
from mindrlhf.backend.operators import ComposedOperators, Operators

ATTENTION_WEIGHTS, FEED_FORWARD_WEIGHTS = names.members("AttentionWeights"), names.members("FeedForwardWeights")


@dataclass(frozen=True)
class EntryPoint:
    """Entry point in C++ (`names.entry_points`).

    Shapes and dtypes of its results are functions of the inputs'.
    """

    name: str
    shapes: Callable
    dtypes: Callable = lambda *inputs: inputs[0]


def _float32s(count: int):
    return lambda *_: (float32,) * count


def _attention_shapes(x, cos, sin, positions, asking, lengths, numbers, norm, wq, wk, *_):
    query, key = [asking[0], wq[0]], [x[0], wk[0]]
    return [asking[0], x[1]], query, key, key, query, key


def _attention_gradient_shapes(*inputs):
    return _of_attention_gradient(inputs[0], *_attention_shapes(*inputs))


def _of_attention_gradient(x, y, query, key, *_):
    return x, x, query, key, key, key, y


def _image_attention_shapes(x, cos, sin, positions, asking, lengths, numbers, norm, qkv, *_):
    width = qkv[0] // 3
    return _attention_shapes(x, cos, sin, positions, asking, lengths, numbers, norm, [width], [width])


def _image_attention_gradient_shapes(*inputs):
    return _of_attention_gradient(inputs[0], *_image_attention_shapes(*inputs))


def _experts_shapes(x, chosen, shares, numbers, w1, *_):
    choices = chosen[0] * chosen[1]
    return x, [choices, w1[1]], [choices, w1[1]], [choices, x[1]]


def _experts_gradient_shapes(*inputs):
    x, gate, _, rows = _experts_shapes(*inputs)
    return x, inputs[2], rows, rows, gate, rows


def _feed_forward_shapes(x, lengths, numbers, norm, w1, *_):
    return x, [x[0], w1[0]], [x[0], w1[0]]


def _feed_forward_gradient_shapes(*inputs):
    x, gate, _ = _feed_forward_shapes(*inputs)
    return x, x, gate, x


STAY_COMPOSED = "linear_bias rotary swiglu group_view group_attention image_attention decode_view decode_attention"
# Every operator of `backend.operators` -> its entry points; none for those that stay composed.
DECLARED: Mapping[str, tuple[EntryPoint, ...]] = {
    **dict.fromkeys(STAY_COMPOSED.split(), ()),
    "linear": (EntryPoint("linear", lambda x, w: [x[0], w[0]]),),
    "rms_norm": (
        EntryPoint("rms_norm", lambda x, w, eps: x),
        EntryPoint("rms_norm_gradient", lambda dy, x, w, eps: (x, w), lambda dy, *_: (dy, dy)),
    ),
    "half": (
        EntryPoint("attention_half", _attention_shapes, _float32s(6)),
        EntryPoint("attention_half_gradient", _attention_gradient_shapes, _float32s(7)),
        EntryPoint("image_attention_half", _image_attention_shapes, _float32s(6)),
        EntryPoint("image_attention_half_gradient", _image_attention_gradient_shapes, _float32s(7)),
        EntryPoint("feed_forward_half", _feed_forward_shapes, _float32s(3)),
        EntryPoint("feed_forward_half_gradient", _feed_forward_gradient_shapes, _float32s(4)),
        EntryPoint("experts_half", _experts_shapes, _float32s(4)),
        EntryPoint("experts_half_gradient", _experts_gradient_shapes, _float32s(6)),
    ),
    "decode_attention_half": (EntryPoint("decode_attention_half", lambda x, *_: x),),
    "decode_feed_forward_half": (EntryPoint("decode_feed_forward_half", lambda x, *_: x),),
    "decode_experts_half": (EntryPoint("decode_experts_half", lambda x, *_: x),),
    "decode_logits": (EntryPoint("decode_logits", lambda x, head: [x[0], head[0]]),),
    "decode_tokens": (
        EntryPoint(
            "decode_tokens",
            lambda *inputs: (*(inputs[8],) * 3, [3]),  # shapes of the context
            lambda *_: (int32, float32, float32, int32),
        ),
    ),
    "admit": (EntryPoint("admit", lambda *_: [1], lambda *_: float32),),
    "token_log_probs": (
        EntryPoint(
            "token_log_probs",
            lambda hidden, head, *_: (*([hidden[0]],) * 3, [hidden[0], head[0]]),
            _float32s(4),
        ),
    ),
    "token_log_probs_gradient": (EntryPoint("token_log_probs_gradient", lambda hidden, *_: hidden),),
    "squared_norm": (EntryPoint("squared_norm", lambda *_: [1]),),
    "adamw": (EntryPoint("adamw", lambda *_: [1]),),
    "rounded_adamw": (EntryPoint("adamw_bfloat16", lambda *_: [1]), EntryPoint("adamw_int8", lambda *_: [1])),
    "shared_sum": (EntryPoint("shared_sum", lambda x, ranks: x),),
}
# Outputs that a half's gradient takes.
KEPT = {
    "attention_half": slice(1, 5),
    "image_attention_half": slice(1, 5),
    "feed_forward_half": slice(1, 3),
    "experts_half": slice(1, 3),
}


class NativeOperators(Operators):
    """Operators of the library at `path`.

    dtype: input dtype of products, float32 or bfloat16; weights: dtype in decode steps, one of these or int8.
    """

    fused = True

    def __init__(self, path: str, dtype: str = "float32", weights: str = "float32", packs_cache: bool = False):
        self.weights = weights
        self.packs_cache = packs_cache
        variants = names.entry_points()

        def opened(entry: EntryPoint) -> ops.Custom:
            kind = weights if "int8" in variants[entry.name] else dtype
            suffix = "" if kind == "float32" or len(variants[entry.name]) == 1 else f"_{kind}"
            where = f"{path}:{entry.name}{suffix}"
            return ops.Custom(where, out_shape=entry.shapes, out_dtype=entry.dtypes, func_type="aot")

        custom = {entry.name: opened(entry) for entries in DECLARED.values() for entry in entries}
        self.linear = custom["linear"]
        self.decode_logits = custom["decode_logits"]
        self.token_log_probs = custom["token_log_probs"]
        self.token_log_probs_gradient = custom["token_log_probs_gradient"]
        self._rms_norm = _RmsNorm(custom["rms_norm"], custom["rms_norm_gradient"])
        self._halves = {
            (name, again): (_Experts if name == "experts_half" else _Half)(
                custom[name], custom[f"{name}_gradient"], kept, again
            )
            for name, kept in KEPT.items()
            for again in (False, True)
        }
        self._decode_attention = custom["decode_attention_half"]
        self._decode_feed_forward = custom["decode_feed_forward_half"]
        self._decode_experts = custom["decode_experts_half"]
        self._tokens = custom["decode_tokens"]
        self._admit = custom["admit"]
        self._squared_norm = custom["squared_norm"]
        self._adamw = custom["adamw"]
        self._adamw_bfloat16 = custom["adamw_bfloat16"]
        self._adamw_int8 = custom["adamw_int8"]
        self._shared_sum = custom["shared_sum"]
        # Without it, independent sums would run in any order, and ranks that begin different sums would wait forever.
        self._shared_sum.add_prim_attr("side_effect_io", True)

    @property
    def composed(self) -> ComposedOperators:
        return ComposedOperators(weights=self.weights)

    def shared_sum(self, group) -> "_SharedSum":
        return _SharedSum(self._shared_sum, group)

    def rms_norm(self, x, weight, eps):
        return self._rms_norm(x, weight, numbers_of("NormNumbers", (("epsilon", eps),)))

    def half(self, name: str, recompute: bool) -> "_Half | None":
        return self._halves.get((f"{name}_half", recompute))

    def decode_attention_half(self, x, weights, positions, numbers, key_cache, value_cache):
        numbers = numbers_of("HalfNumbers", numbers)
        return self._decode_attention(x, *positions, numbers, key_cache, value_cache, *weights)

    def decode_feed_forward_half(self, x, weights, numbers):
        return self._decode_feed_forward(x, numbers_of("HalfNumbers", numbers), *weights)

    def decode_experts_half(self, x, weights, numbers, kept):
        return self._decode_experts(x, numbers_of("DecodeExpertNumbers", numbers), *kept, *weights)

    def admit(self, slots, rows, limit, prefilled, caches):
        return self._admit(slots, rows, numbers_of("AdmitNumbers", (("limit", limit),)), *prefilled, *caches)

    def decode_tokens(self, slots, uniform, rules, stop_ids, table, angles, norm, head, kept, layers, given, numbers):
        fixed = (table, *angles, norm, head, numbers_of("DecodeNumbers", numbers), integers(given), kept)
        return self._tokens(*slots, uniform, rules, stop_ids, *fixed, *layers)

    def squared_norm(self, gradients):
        return self._squared_norm(*gradients).reshape(())

    def adamw(self, parameters, gradients, first, second, decays, rows, numbers):
        # No loop over parameters: MindSpore would infer one tuple for each, and each is longer than the one before.
        return self._adamw(ops.stack(numbers), update_layout(rows, decays), *parameters, *first, *second, *gradients)

    def rounded_adamw(self, parameters, gradients, first, second, scales, decays, rows, numbers, draws, columns):
        layout = update_layout(rows, decays, columns)
        arrays = (*parameters, *gradients, *first, *second, *scales)
        update = self._adamw_int8 if scales else self._adamw_bfloat16
        return update(ops.stack(numbers), layout, *draws, *arrays)


@functools.cache
def open_operators(
    dtype: str = "float32", weights: str | None = None, packs_cache: bool = False
) -> NativeOperators | None:
    """Open the built operators; None if they could not be built.

    dtype, weights: see `NativeOperators`; `weights` is `dtype` by default.
    """
    path = library().path
    return NativeOperators(str(path), dtype, weights or dtype, packs_cache) if path else None


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
def update_layout(rows, decays, *columns):
    """Describe parameters as int32[2 * n]: first row, and 1 for weight decay.

    columns: the first column of each, the third number of it.
    """
    starts = [start for start, _ in rows]
    return Tensor(np.array(list(zip(starts, decays, *columns, strict=True)), np.int32).ravel())


class _RmsNorm(nn.Cell):
    def __init__(self, forward, gradient):
        super().__init__(auto_prefix=False)
        self.forward = forward
        self.gradient = gradient

    def construct(self, x, weight, eps):
        return self.forward(x, weight, eps)

    def bprop(self, x, weight, eps, out, d_out):
        d_x, d_weight = self.gradient(d_out, x, weight, eps)
        return d_x, d_weight, eps


class _SharedSum(nn.Cell):
    """Sum over a group's ranks, forward and backward: float32[...] -> [...]."""

    def __init__(self, operator, group):
        super().__init__(auto_prefix=False)
        self.operator = operator
        self.group = Tensor(np.array(group, np.int32))

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
        self.forward = forward
        self.gradient = gradient
        self.recompute = recompute
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


class _Experts(_Half):
    """Experts of a half, without its norm and its router.

    x: [T, hidden], normed; chosen: int32[T, k], the number of experts where a row has none; shares: [T, k], of a row's
    experts, whose gradient is an output too; others as in `_Half`, with `ExpertNumbers`.
    """

    def construct(self, x, chosen, shares, numbers, weights, buffers, trigger):
        for buffer in buffers:
            x = ops.depend(x, buffer)
        return self.forward(x, chosen, shares, numbers, *weights)

    def bprop(self, x, chosen, shares, numbers, weights, buffers, trigger, out, d_out):
        if self.recompute:
            x = ops.depend(x, d_out[0])
            out = self.forward(x, chosen, shares, numbers, *weights)
        kept = out[self.first_kept : self.end_kept]
        found = self.gradient(x, chosen, shares, numbers, *weights, *kept, d_out[0], *buffers)
        d_x, d_shares = found[0], found[1]
        return d_x, chosen, d_shares, numbers, weights, buffers, ops.depend(trigger, d_x)
