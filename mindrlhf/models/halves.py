"""Halves of a decoder layer: x + leave(attention(x)), then x + leave(feed_forward(x)).

Each half has one composed form, of MindSpore's operators, and at most one fused form, a C++ operator
(`backend.native`): biases, norms of heads and adapters are data of a half. `models.layer` lists the halves.

A half is one parallel region (Shoeybi et al. 2019, arXiv:1909.08053, section 3): each rank has some of the heads or of
the inner columns, and `leave` sums the ranks' results. The first rank adds x before the sum, so that the half's
operator can do it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from mindspore import Parameter, Tensor, nn

from mindrlhf.backend.comm.graph_collectives import ExpertParallel, TensorParallel
from mindrlhf.backend.native.operators import ATTENTION_WEIGHTS, FEED_FORWARD_WEIGHTS, numbers_of
from mindrlhf.backend.operators import Operators
from mindrlhf.configs.lora import LAYERS
from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.dropout import InputDropout
from mindrlhf.models.inputs import ANGLES, COS, COS_TABLE, PLACES, SIN, SIN_TABLE, SPANS, VIEW
from mindrlhf.models.linear import Linear, Norm, map_names
from mindrlhf.models.parameters import ParameterSpec
from mindrlhf.models.weight import Weight

# Rows of a half's output: none that are read, the rows of completions, or all rows.
NO_ROWS, COMPLETIONS, ALL_ROWS = 0, 1, 2
ONE_ROW = (0, 0, 0, 0)  # split of a decode step, which has one row for each slot


class HalfMaterials(Protocol):
    """Inputs from which a half of a block is built.

    See `Materials`. eps: of its norm.
    """

    @property
    def operators(self) -> Operators: ...

    @property
    def shards(self) -> TensorParallel: ...

    @property
    def recompute(self) -> bool: ...

    @property
    def eps(self) -> float: ...

    def linear(self, name: str) -> Linear:
        """Build the linear map of this name within the block."""

    def norm(self, name: str) -> Norm | None:
        """Build the norm of this name within the block; None without one."""


@dataclass(frozen=True)
class Materials:
    """Inputs from which the halves of one layer are built.

    layer: its index. adapters: table rows of the adapter matrices in use, by name; other adapter matrices in
    `parameters` are ignored. recompute: the backward pass computes a half again from its input, in the fused form
    only. dropout: share of the adapters' inputs that is dropped, in the composed form only. packed: weights packed
    for decode steps, by name. spread: the ranks over which experts are spread. replays: the routing is an input of the
    positions. records: it is a side output, and decode steps write it to its cache.
    """

    layer: int
    config: ModelConfig
    parameters: Mapping[str, Parameter]
    operators: Operators
    shards: TensorParallel
    adapters: Mapping[str, ParameterSpec]
    recompute: bool = False
    dropout: float = 0.0
    packed: Mapping[str, Parameter] = field(default_factory=dict)
    spread: ExpertParallel = field(default_factory=ExpertParallel)
    replays: bool = False
    records: bool = False

    @property
    def prefix(self) -> str:
        """The beginning of the layer's names in `parameters`."""
        return f"{LAYERS}{self.layer}."

    @property
    def eps(self) -> float:
        return self.config.rms_norm_eps

    def linear(self, name: str) -> Linear:
        name = f"{self.prefix}{name}"
        packed = self.packed.get(f"{name}.weight")
        return Linear.of_map(name, self.parameters, self.adapters, self.operators, self._dropout(name), packed)

    def _dropout(self, name: str) -> InputDropout | None:
        """Build the dropout of an adapted map's input, or None; A gives the columns."""
        a = f"{name}.lora_a"
        if not self.dropout or a not in self.adapters:
            return None
        count = self.parameters[a].shape[1]
        first = self.shards.rank * count if self.adapters[a].is_cut(1) else 0
        return InputDropout(name, self.dropout, range(first, first + count))

    def norm(self, name: str, rms_norm=None) -> Norm | None:
        """Build the norm of this name within the layer; None without one.

        rms_norm: the operator; the composed one by default.
        """
        weight = self.parameters.get(f"{self.prefix}{name}.weight")
        rms_norm = rms_norm or self.operators.composed.rms_norm
        return None if weight is None else Norm(weight, self.eps, rms_norm)


class Half(nn.Cell):
    """Half of a layer: weights for its operators, and ends of its parallel region.

    name: of `ModelOperators.half`, whose operator is the fused form, if there is one. names: names of the operator's
    arrays; the last are the adapters' scales. linears: linear maps by name, in the order of the scales, None for an
    absent one. others: further weights by name; None for an absent weight.

    sides: names of the side outputs, further arrays that `construct` returns. Each tensor-parallel rank computes the
    whole arrays, from x inside of the parallel region. recorded: names of those that follow if the routing is recorded.
    """

    sides: tuple[str, ...] = ()
    recorded: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        linears: Mapping[str, Linear | None],
        others: Mapping[str, Weight | None],
        given: HalfMaterials,
    ):
        super().__init__(auto_prefix=False)
        named = dict(others)
        for one, linear in linears.items():
            named |= dict.fromkeys(map_names(one)) if linear is None else linear.weights(one)
        self.weights = self.decodes = tuple(named[one] for one in names[:-1])
        adapters = [None if linear is None else linear.adapter for linear in linears.values()]
        scales = [0.0 if adapter is None else adapter.scale for adapter in adapters]
        self.scales = (Tensor(np.array(scales, np.float32)),) if any(scales) else ()
        self.enter = given.shards.enter
        self.leave = given.shards.leave
        self.residual = given.shards.rank == 0
        self.form = given.operators.half(name, given.recompute)
        self.fused = self.form is not None

    @property
    def arrays(self) -> tuple:
        """The weights as inputs of an operator."""
        return (*(weight.parameter for weight in self.weights if weight is not None), *self.scales)

    @property
    def decoded(self) -> tuple:
        """The inputs of a decode step's operator, where matrices may be packed."""
        return (*(weight.decoded for weight in self.decodes if weight is not None), *self.scales)

    @property
    def present(self) -> int:
        """Bits of the operator's weights that this half has, in the order of names."""
        return _bits((*(weight is not None for weight in self.weights), bool(self.scales)))

    @property
    def decode_present(self) -> int:
        """Bits of the weights that a decode step's operator takes."""
        return _bits((*(weight is not None for weight in self.decodes), bool(self.scales)))

    @property
    def buffers(self) -> tuple:
        """The buffers of the weights' gradients."""
        return tuple(weight.buffer for weight in self.weights if weight is not None and weight.collects)

    @property
    def collected(self) -> int:
        """Bits of the operator's weights whose gradients have a buffer."""
        return _bits(weight is not None and weight.collects for weight in self.weights)

    def numbers(self, split, asking, head_size=0, scale=0.0, together=0):
        """List the values of `HalfNumbers`.

        split, asking: as in `construct`.
        """
        _, prefix, samples, completion = split
        sizes = (("prefix", prefix), ("samples", samples), ("completion", completion), ("asking", asking))
        half = (("residual", self.residual), ("head_size", head_size), ("scale", scale), ("epsilon", self.eps))
        return (*sizes, *half, ("together", together), ("weights", self.present), ("buffers", self.collected))

    @property
    def trigger(self) -> Parameter | None:
        """The trigger of `models.weight`, if there are gradients."""
        return next((weight.trigger for weight in self.weights if weight is not None and weight.passes), None)

    def run_fused(self, x, others):
        """Run the operator on x [T, hidden] and its other inputs.

        Returns all of its outputs.
        """
        if self.trigger is None:
            return self.form.forward(x, *others, *self.arrays)
        return self.form(x, others, self.arrays, self.buffers, self.trigger)


class AttentionHalf(Half):
    """Attention half: x [rows, hidden] -> x + wo(attention(norm(x))), for some rows.

    Rows may be this rank's slice of T (`TensorParallel.sequence`).
    """

    def __init__(self, name: str, given: Materials):
        norm, q_norm, k_norm = map(given.norm, ("attention_norm", "attention.q_norm", "attention.k_norm"))
        linears = {name: given.linear(f"attention.{name}") for name in ("wq", "wk", "wv", "wo")}
        others = {"norm": norm.weight, "q_norm": q_norm and q_norm.weight, "k_norm": k_norm and k_norm.weight}
        super().__init__(name, ATTENTION_WEIGHTS, linears, others, given)
        self.norm = norm
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.wq, self.wk, self.wv, self.wo = linears.values()
        self.head_dim = given.config.head_dim
        self.scale = self.head_dim**-0.5
        self.eps = given.eps
        self.heads, self.kv_heads = (one.weight.shape[0] // self.head_dim for one in (self.wq, self.wk))
        operators = given.operators
        self.rotary = operators.rotary
        self.attend = operators.group_attention
        self.decode_attention = operators.decode_attention
        self.decode_fused = operators.decode_attention_half

    def construct(self, x, given, split, asking):
        """Run the half on all rows.

        given: the layer's inputs (`models.inputs`); split: (N, P, G, R); asking: which rows the output has.

        Returns the output, of all T rows the keys, ready for a cache, and the values, [T, K * D], and the side outputs.
        """
        x = self.enter(x)
        if self.fused:
            out = self._fused(x, given, split, asking)
            return self.leave(out[0]), out[5], out[3], ()
        cos, sin = given[COS], given[SIN]
        h = self.norm(x)
        k = self._heads(self.wk(h, given), self.k_norm, self.kv_heads, cos, sin)
        v = self.wv(h, given)
        key = k.reshape((k.shape[0], -1))
        if asking == NO_ROWS:
            return x[:1], key, v, ()
        start = x.shape[0] - split[0] * split[2] * split[3] if asking == COMPLETIONS else 0
        q = self._heads(self.wq(h[start:], given), self.q_norm, self.heads, cos[:, start:], sin[:, start:])
        y = self.wo(self.attend(q, k, v.reshape(k.shape), given[VIEW], split, self.scale), given)
        return self.leave(y + x[start:] if self.residual else y), key, v, ()

    def _fused(self, x, given, split, asking):
        _, _, g, r = split
        asked = x.shape[0] - (x.shape[0] - split[0] * g * r if asking == COMPLETIONS else 0)
        asked = 1 if asking == NO_ROWS else asked
        numbers = numbers_of("HalfNumbers", self.numbers(split, asking, self.head_dim, self.scale))
        angles = given[ANGLES]
        return self.run_fused(x, (given[COS_TABLE], given[SIN_TABLE], angles, angles[:asked], given[SPANS], numbers))

    def _heads(self, x, norm, heads, cos, sin):
        """Split, normalise and rotate heads: [T, heads * D] -> [T, heads, D].

        Norms are applied if the model has them.
        """
        x = x.reshape((1, -1, heads, self.head_dim))
        if norm is not None:
            x = norm(x)
        return self.rotary(x, cos, sin).reshape((-1, heads, self.head_dim))

    def decode(self, x, given, keys, values):
        """Run one new position of each slot: [B, hidden] -> [B, hidden].

        Writes its key and value to the caches in place. given: the layer's inputs.
        """
        x = self.enter(x)
        if self.fused:
            numbers = self.numbers(ONE_ROW, ALL_ROWS, self.head_dim, self.scale)
            positions = (given[COS_TABLE], given[SIN_TABLE], given[PLACES], given[ANGLES])
            return self.leave(self.decode_fused(x, self.decoded, positions, numbers, keys, values))
        cos, sin = given[COS], given[SIN]
        h = self.norm(x)
        q = self._heads(self.wq(h, given), self.q_norm, self.heads, cos, sin)
        k = self._heads(self.wk(h, given), self.k_norm, self.kv_heads, cos, sin)
        v = self.wv(h, given).reshape(k.shape)
        y = self.wo(self.decode_attention(q, k, v, keys, values, given[VIEW], self.scale), given)
        return self.leave(y + x if self.residual else y)


class FeedForwardHalf(Half):
    """Feed-forward half: x [rows, hidden] -> x + w2(silu(w1(norm(x))) * w3(norm(x)))."""

    norm_name = "ffn_norm"
    maps: Mapping[str, str] = {"w1": "feed_forward.w1", "w3": "feed_forward.w3", "w2": "feed_forward.w2"}

    def __init__(self, name: str, given: HalfMaterials):
        norm = given.norm(self.norm_name)
        linears = {one: given.linear(path) for one, path in self.maps.items()}
        super().__init__(name, FEED_FORWARD_WEIGHTS, linears, {"norm": norm.weight, "router": None}, given)
        self.norm = norm
        self.w1, self.w3, self.w2 = linears.values()
        self.swiglu = given.operators.swiglu
        self.eps = given.eps
        self.decode_fused = given.operators.decode_feed_forward_half

    def construct(self, x, given, split, asking):
        """Run the half on the rows `asking`.

        given, split, asking: as in `AttentionHalf`; x has only these rows.

        Returns the output and the side outputs.
        """
        x = self.enter(x)
        if self.fused:
            numbers = numbers_of("HalfNumbers", self.numbers(split, asking))
            return self.leave(self.run_fused(x, (given[SPANS], numbers))[0]), ()
        return self.leave(self._composed(x, given)), ()

    def _composed(self, x, given):
        h = self.norm(x)
        y = self.w2(self.swiglu(self.w1(h, given), self.w3(h, given)), given)
        return y + x if self.residual else y

    def decode(self, x, given):
        """Run one row for each slot: [B, hidden] -> [B, hidden]."""
        x = self.enter(x)
        if self.fused:
            return self.leave(self.decode_fused(x, self.decoded, self.numbers(ONE_ROW, ALL_ROWS)))
        return self.leave(self._composed(x, given))


def _bits(flags: Iterable[bool]) -> int:
    return sum(flag << i for i, flag in enumerate(flags))
