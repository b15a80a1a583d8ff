"""Halves of a decoder layer: x + leave(attention(x)), then x + leave(feed_forward(x)).

Each half has one composed form, of MindSpore's operators, and at most one fused one, a C++ operator (`backend.native`):
biases and norms of heads are data of a half. A half is one parallel region (Shoeybi et al. 2019, arXiv:1909.08053,
section 3): its rank has some of the heads or of the inner columns, and `leave` sums the ranks' parts. x is added by
the first rank, before the sum, so that one operator does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspore import Parameter, nn

from mindrlhf.backend import Kernels
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.native.operators import ATTENTION_WEIGHTS, FEED_FORWARD_WEIGHTS, NONE, numbers_of
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.weight import Weight

# Which rows a half's output has: none that anybody reads, those of completions, or all.
NO_ROWS, COMPLETIONS, ALL_ROWS = 0, 1, 2


class Linear(nn.Cell):
    """Product x [T, in] -> [T, out], in the dtype of x.

    The weight is [out, in], the optional bias [out].
    """

    def __init__(self, weight: Parameter, bias: Parameter | None, kernels: Kernels):
        super().__init__(auto_prefix=False)
        self.weight = Weight(weight)
        self.bias = Weight(bias) if bias is not None else None
        self.linear, self.linear_bias = kernels.composed.linear, kernels.composed.linear_bias

    def construct(self, x):
        weight, x = self.weight(x)
        if self.bias is None:
            return self.linear(x, weight)
        bias, x = self.bias(x)
        return self.linear_bias(x, weight, bias)


class Norm(nn.Cell):
    """RMSNorm over the last axis, with a weight of its size."""

    def __init__(self, weight: Parameter, eps: float, rms_norm):
        super().__init__(auto_prefix=False)
        self.weight, self.eps, self.rms_norm = Weight(weight), eps, rms_norm

    def construct(self, x):
        weight, x = self.weight(x)
        return self.rms_norm(x, weight, self.eps)


@dataclass(frozen=True)
class Materials:
    """Materials of one layer, from which its halves are built.

    prefix: the beginning of the layer's names among `parameters`. recompute: the backward pass computes a half again
    from its input; only the fused form can.
    """

    config: ModelConfig
    prefix: str
    parameters: Mapping[str, Parameter]
    kernels: Kernels
    shards: TensorParallel
    recompute: bool = False

    def linear(self, name: str) -> Linear:
        """Build the linear map of this name within the layer."""
        name = f"{self.prefix}{name}"
        return Linear(self.parameters[f"{name}.weight"], self.parameters.get(f"{name}.bias"), self.kernels)

    def norm(self, name: str) -> Norm | None:
        """Build the norm of this name within the layer; None without one."""
        weight = self.parameters.get(f"{self.prefix}{name}.weight")
        return None if weight is None else Norm(weight, self.config.rms_norm_eps, self.kernels.composed.rms_norm)


class Half(nn.Cell):
    """Weights of a half for its operators, and its parallel region's ends.

    weights: one for each of the operator's names, None for an absent one. name: that of the fused form.
    """

    def __init__(self, weights: Sequence[Weight | None], name: str, given: Materials):
        super().__init__(auto_prefix=False)
        self.weights = tuple(weights)
        self.enter, self.leave = given.shards.enter, given.shards.leave
        self.residual = given.shards.rank == 0
        self.fused = given.kernels.fused is not None
        self.form = given.kernels.fused.half(name, given.recompute) if self.fused else None

    @property
    def arrays(self) -> tuple:
        """The weights as inputs of an operator."""
        return tuple(NONE if weight is None else weight.parameter for weight in self.weights)

    @property
    def collected(self) -> tuple:
        """The buffers of the weights' gradients."""
        return tuple(weight.buffer if weight is not None and weight.collects else NONE for weight in self.weights)

    @property
    def trigger(self) -> Parameter | None:
        """The trigger of `models.weight`, if there are gradients."""
        return next((weight.trigger for weight in self.weights if weight is not None and weight.passes), None)

    def run_fused(self, x, places):
        """Run the operator on x [T, hidden]; returns all of its outputs."""
        if self.trigger is None:
            return self.form.forward(x, *self.arrays, *places)
        return self.form(x, self.arrays, places, self.collected, self.trigger)


class AttentionHalf(Half):
    """Half x [rows, hidden] -> x + wo(attention(norm(x))), for some rows.

    Rows may be this rank's slice of T (`TensorParallel.sequence`).
    """

    def __init__(self, given: Materials):
        linear, norm = given.linear, given.norm
        before = norm("attention_norm")
        wq, wk, wv, wo = (linear(f"attention.{name}") for name in ("wq", "wk", "wv", "wo"))
        q_norm, k_norm = norm("attention.q_norm"), norm("attention.k_norm")
        named = {"norm": before.weight, "wq": wq.weight, "wk": wk.weight, "wv": wv.weight, "wo": wo.weight}
        named |= {"wq_bias": wq.bias, "wk_bias": wk.bias, "wv_bias": wv.bias}
        named |= {"q_norm": q_norm and q_norm.weight, "k_norm": k_norm and k_norm.weight}
        super().__init__([named[name] for name in ATTENTION_WEIGHTS], "attention", given)
        self.norm, self.wq, self.wk, self.wv, self.wo, self.q_norm, self.k_norm = before, wq, wk, wv, wo, q_norm, k_norm
        self.head_dim = given.config.head_dim
        self.scale, self.eps = self.head_dim**-0.5, given.config.rms_norm_eps
        self.heads, self.kv_heads = (one.weight.shape[0] // self.head_dim for one in (wq, wk))
        composed, fused = given.kernels.composed, given.kernels.fused
        self.rotary, self.attend = composed.rotary, composed.group_attention
        self.decode_attention, self.decode_fused = composed.decode_attention, fused and fused.decode_attention

    def construct(self, x, places, split, asking):
        """Run the half on all rows.

        places: of `Decoder`; split: (N, P, G, R); asking: the rows of the output.

        Returns also the keys, ready for a cache, and the values of all T rows, [T, K * D].
        """
        x = self.enter(x)
        if self.fused:
            out = self._fused(x, places, split, asking)
            return self.leave(out[0]), out[5], out[3]
        cos, sin, view = places
        h = self.norm(x)
        k, v = self._heads(self.wk(h), self.k_norm, self.kv_heads, cos, sin), self.wv(h)
        key, value = k.reshape((k.shape[0], -1)), v
        if asking == NO_ROWS:
            return x[:1], key, value
        start = x.shape[0] - split[0] * split[2] * split[3] if asking == COMPLETIONS else 0
        q = self._heads(self.wq(h[start:]), self.q_norm, self.heads, cos[:, start:], sin[:, start:])
        y = self.wo(self.attend(q, k, v.reshape(k.shape), view, split, self.scale))
        return self.leave(y + x[start:] if self.residual else y), key, value

    def _fused(self, x, places, split, asking):
        cos, sin, positions, lengths = places
        _, p, g, r = split
        asked = x.shape[0] - (x.shape[0] - split[0] * g * r if asking == COMPLETIONS else 0)
        asked = 1 if asking == NO_ROWS else asked
        numbers = numbers_of("HalfNumbers", self.numbers(p, g, r, asking))
        return self.run_fused(x, (cos, sin, positions, positions[:asked], lengths, numbers))

    def numbers(self, prefix, samples, completion, asking):
        sizes = (("prefix", prefix), ("samples", samples), ("completion", completion), ("asking", asking))
        rest = (("residual", self.residual), ("head_size", self.head_dim), ("scale", self.scale), ("epsilon", self.eps))
        return sizes + rest

    def _heads(self, x, norm, heads, cos, sin):
        """Split, norm and rotate heads: [T, heads * D] -> [T, heads, D].

        Norms are applied if the model has them.
        """
        x = x.reshape((1, -1, heads, self.head_dim))
        if norm is not None:
            x = norm(x)
        return self.rotary(x, cos, sin).reshape((-1, heads, self.head_dim))

    def decode(self, x, places, keys, values):
        """Run one new position of each slot: [B, hidden] -> [B, hidden].

        Its key and value go into the caches in place.
        """
        x = self.enter(x)
        if self.fused:
            numbers = self.numbers(0, 0, 0, ALL_ROWS)
            return self.leave(self.decode_fused(x, self.arrays, places, numbers, keys, values))
        cos, sin, view = places
        h = self.norm(x)
        q = self._heads(self.wq(h), self.q_norm, self.heads, cos, sin)
        k = self._heads(self.wk(h), self.k_norm, self.kv_heads, cos, sin)
        y = self.wo(self.decode_attention(q, k, self.wv(h).reshape(k.shape), keys, values, view, self.scale))
        return self.leave(y + x if self.residual else y)


class FeedForwardHalf(Half):
    """Half x [rows, hidden] -> x + w2(silu(w1(norm(x))) * w3(norm(x)))."""

    def __init__(self, given: Materials):
        norm = given.norm("ffn_norm")
        w1, w2, w3 = (given.linear(f"feed_forward.{name}") for name in ("w1", "w2", "w3"))
        named = {"norm": norm.weight, "w1": w1.weight, "w3": w3.weight, "w2": w2.weight}
        super().__init__([named[name] for name in FEED_FORWARD_WEIGHTS], "feed_forward", given)
        self.norm, self.w1, self.w2, self.w3 = norm, w1, w2, w3
        self.swiglu, self.eps = given.kernels.composed.swiglu, given.config.rms_norm_eps
        self.decode_fused = given.kernels.fused and given.kernels.fused.decode_feed_forward

    def construct(self, x, places, split, asking):
        """Run the half on the rows `asking`.

        places, split, asking: as in `AttentionHalf`; x has only these rows.
        """
        x = self.enter(x)
        if self.fused:
            numbers = numbers_of("HalfNumbers", self.numbers(split[1], split[2], split[3], asking))
            return self.leave(self.run_fused(x, (places[3], numbers))[0])
        return self.leave(self._composed(x))

    def numbers(self, prefix, samples, completion, asking):
        sizes = (("prefix", prefix), ("samples", samples), ("completion", completion), ("asking", asking))
        return (*sizes, ("residual", self.residual), ("head_size", 0), ("scale", 0.0), ("epsilon", self.eps))

    def _composed(self, x):
        h = self.norm(x)
        y = self.w2(self.swiglu(self.w1(h), self.w3(h)))
        return y + x if self.residual else y

    def decode(self, x):
        """Run one row for each slot: [B, hidden] -> [B, hidden]."""
        x = self.enter(x)
        if self.fused:
            return self.leave(self.decode_fused(x, self.arrays, self.numbers(0, 0, 0, ALL_ROWS)))
        return self.leave(self._composed(x))


class Layer(nn.Cell):
    """Decoder layer of two halves."""

    def __init__(self, given: Materials):
        super().__init__(auto_prefix=False)
        self.attention, self.feed_forward = AttentionHalf(given), FeedForwardHalf(given)

    def construct(self, x, places, split, asking=ALL_ROWS):
        """Run both halves on x [rows, hidden].

        Returns the rows `asking`, and keys and values of all rows: see `AttentionHalf`.
        """
        x, key, value = self.attention(x, places, split, asking)
        if asking == NO_ROWS:
            return x, key, value
        return self.feed_forward(x, places, split, asking), key, value

    def decode(self, x, places, keys, values):
        """Run one new position of each slot: [B, hidden] -> [B, hidden]."""
        return self.feed_forward.decode(self.attention.decode(x, places, keys, values))
