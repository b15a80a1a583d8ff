"""Feed-forward half with experts.

Each token's output is the weighted sum of a few experts' outputs. A router gives each token probabilities of all
experts, and the most probable ones compute it (Shazeer et al. 2017, arXiv:1701.06538; the softmax before the choice as
in Fedus et al. 2021, arXiv:2101.03961). No expert has a capacity limit and no token is dropped; padding is routed
nowhere.

Experts may be spread over ranks that have other rows (`ExpertParallel`). Each rank then gathers the rows of all and
sums up what its experts make of them; the sums go back to the rows' ranks. A token with 8 experts needs nearly every
one of a few ranks anyway, and no shape depends on the routing, as it would if rows were sent to their experts.

Composed form: rows are sorted by expert, each expert's rows begin a new block of a few rows, and a block is one product
with its expert's matrix. Shapes do not depend on the routing: there is room for one incomplete block of every expert.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.comm.graph_collectives import ExpertParallel
from mindrlhf.backend.native.operators import FEED_FORWARD_WEIGHTS, numbers_of
from mindrlhf.models.expert_layers import BALANCE, CHOSEN, EXPERT_MAPS, LOAD, ROUTER
from mindrlhf.models.halves import COMPLETIONS, Half, Materials
from mindrlhf.models.inputs import KEPT, PLACES, ROWS, SPANS
from mindrlhf.models.linear import map_names
from mindrlhf.models.routing import RoutingForm
from mindrlhf.models.weight import Weight

LEAST_BLOCK, BLOCK_UNIT = 8, 8  # rows
COPY_ROWS = 20  # copying a matrix of an expert takes as long as a product with this many rows


class Moved(nn.Cell):
    """Rows of x [A, width] in another order: [B, width].

    Row A is a row of zeros.

    there: int32[B], a row of x, or A, for each result. back: int32[A * times], the results that are each row of x, or
    B; the gradient is their sum.
    """

    def __init__(self, times: int = 1):
        super().__init__(auto_prefix=False)
        self.times = times

    def construct(self, x, there, back):
        return _gathered(x, there)

    def bprop(self, x, there, back, out, d_out):
        d_x = _gathered(d_out, back)
        if self.times > 1:
            d_x = d_x.reshape((x.shape[0], self.times, x.shape[1])).sum(1)
        return d_x, there, back


class ExpertLinear(nn.Cell):
    """Products of blocks of rows, each with its expert's matrix.

    They map [blocks, rows, in] -> [blocks, rows, out].

    weight: [experts, out, in]. adapter: A [experts, rank, in] and B [experts, out, rank] with a scale, or None.
    """

    def __init__(self, given: Materials, name: str):
        super().__init__(auto_prefix=False)
        linear = given.linear(name)
        self.weight = linear.weight
        self.adapter = linear.adapter
        self.product = ops.BatchMatMul(transpose_b=True)

    def construct(self, x, experts, keys):
        """Multiply; experts: int32[blocks]; keys: of the rows, for dropout."""
        y = self._product(x, self.weight, experts)
        if self.adapter is None:
            return y
        if self.adapter.dropout is not None:
            x = self.adapter.dropout(x.reshape((-1, x.shape[2])), keys).reshape(x.shape)
        low = self._product(x, self.adapter.a, experts)
        return y + self._product(low, self.adapter.b, experts) * self.adapter.scale

    def _product(self, x, weight, experts):
        return self.product(x, weight.rows(experts).astype(x.dtype))

    def weights(self, name: str) -> dict[str, Weight | None]:
        """Return the weights by their names in an operator, for a map called `name`."""
        a, b = (self.adapter.a, self.adapter.b) if self.adapter else (None, None)
        return dict(zip(map_names(name), (self.weight, None, a, b), strict=True))


class ExpertsHalf(Half):
    """Feed-forward half with experts.

    It maps x [rows, hidden] -> x + sum of p_e * f_e(norm(x)) over the chosen experts e; f(h) is w2(silu(w1(h)) *
    w3(h)).
    """

    sides = (LOAD, BALANCE)
    recorded = (CHOSEN,)

    def __init__(self, name: str, given: Materials):
        norm = given.norm("ffn_norm", given.operators.rms_norm)
        router = given.linear(ROUTER).weight
        linears = {one: ExpertLinear(given, path) for one, path in EXPERT_MAPS.items()}
        absent = {"norm": None, "router": None}  # of the fused form in updates
        super().__init__(name, FEED_FORWARD_WEIGHTS, linears, absent, given)
        self.decodes = (norm.weight, router, *self.weights[2:])
        config = given.config
        self.norm = norm
        self.router = router
        self.router_trains = config.router_trains
        self.linear = given.operators.composed.linear
        self.w1, self.w3, self.w2 = linears.values()
        self.swiglu = given.operators.swiglu
        self.experts = config.num_experts
        self.chosen = config.num_experts_per_tok
        self.normalises = config.norm_topk_prob
        self.layers = len(config.expert_layers)
        self.eps = config.rms_norm_eps
        self.decode_fused = given.operators.decode_experts_half
        self.to_blocks = Moved(self.chosen)
        self.from_blocks = Moved()
        self._hold_routing(given)
        self._hold_spread(given.spread)

    def _hold_spread(self, spread: ExpertParallel) -> None:
        """Set this rank's experts, and its exchange of rows with other ranks."""
        self.spreads = spread.size > 1
        self.own_experts = self.w1.weight.shape[0]
        self.first_expert = spread.rank * self.own_experts
        self.gather, self.scatter = spread.gather, spread.scatter

    def _hold_routing(self, given: Materials) -> None:
        """Set how the routing is replayed and recorded."""
        form = RoutingForm.of(given.config)
        own = form.columns(given.layer)
        self.records = given.records
        self.replays = given.replays
        self.drops = given.dropout > 0
        self.place = own.start // self.chosen
        self.first, self.end = own.start, own.stop
        self.routing_at = int(self.drops)  # among the positions' further arrays
        self.nothing = Tensor(np.zeros((1, 1, 1, 1), np.int32))
        self.put = ops.ScatterNdUpdate()

    def construct(self, x, given, split, asking):
        """Run the half on the rows `asking`.

        given, split, asking: as in `AttentionHalf`; x has only these rows.

        Returns the output and the side outputs.
        """
        x = self.enter(x)
        y, sides = self._composed(x, given, real_rows(given[SPANS], split, asking))
        return self.leave(y), sides

    def decode(self, x, given):
        """Run one row for each slot: [B, hidden] -> [B, hidden]."""
        x = self.enter(x)
        if self.fused and not self.spreads:
            kept = (given[PLACES], given[KEPT]) if self.records else (self.nothing, self.nothing)
            return self.leave(self.decode_fused(x, self.decoded, self._decode_numbers(), kept))
        y, sides = self._composed(x, given, ops.ones((x.shape[0], 1), x.dtype).astype("float32"))
        if self.records:
            y = ops.depend(y, self._keep(sides[-1], given[PLACES], given[KEPT]))
        return self.leave(y)

    def _keep(self, chosen, places, kept):
        """Write the experts of slots' new positions to the cache."""
        slots = ops.arange(0, chosen.shape[0]).astype("int32").reshape((-1, 1))
        layer = ops.full_like(slots, self.place)
        return self.put(kept, ops.concat((slots, layer, places.reshape((-1, 1))), 1), chosen)

    def _decode_numbers(self):
        """List the values of `DecodeExpertNumbers`."""
        layer = self.place if self.records else -1
        choice = (("chosen", self.chosen), ("normalises", self.normalises), ("layer", layer))
        return (("residual", self.residual), ("weights", self.decode_present), *choice, ("epsilon", self.eps))

    def _composed(self, x, given, real):
        """Compute the half and its side outputs; real: float32[rows, 1], 0 for padding."""
        h = self.norm(x)
        probabilities = self._probabilities(h)
        chosen = ops.topk(ops.stop_gradient(probabilities), self.chosen)[1].astype("int32")
        if self.replays:
            chosen = self._replayed(chosen, given[ROWS][self.routing_at])
        weights = ops.gather_elements(probabilities, 1, chosen)
        if self.normalises:
            weights = weights / expand(weights.sum(-1, keepdims=True), weights.shape)
        placed = ops.select(expand(real, chosen.shape) > 0, chosen, ops.full_like(chosen, self.experts))
        load = self._load(placed)
        if self.spreads:
            y = self._exchanged(h, placed, weights)
        else:
            y = self._sum(h, placed, weights, given[ROWS][0] if self.drops else ())
        own = (chosen,) if self.records else ()
        return (y + x if self.residual else y), (load, self._balance(probabilities, load, real), *own)

    def _load(self, placed):
        """Count the choices int32[rows, k] of each expert: float32[experts]."""
        wide = (placed.shape[0] * placed.shape[1], self.experts)
        every = expand(ops.arange(0, self.experts).astype("int32").reshape((1, -1)), wide)
        return (expand(placed.reshape((-1, 1)), wide) == every).astype("float32").sum(0)

    def _exchanged(self, h, placed, weights):
        """Compute the sum over experts of all ranks.

        Each rank computes its experts for the rows of all ranks. Rows travel with their choices, in float32.
        """
        size = h.shape[1]
        end = size + self.chosen
        rows = self.gather(ops.concat((h.astype("float32"), weights, placed.astype("float32")), 1))
        every = rows[:, end:].astype("int32") - self.first_expert
        here = ops.logical_and(every >= 0, every < self.own_experts)
        every = ops.select(here, every, ops.full_like(every, self.own_experts))
        y = self._sum(rows[:, :size].astype(h.dtype), every, rows[:, size:end], ())
        return self.scatter(y.astype("float32")).astype(h.dtype)

    def _sum(self, h, placed, weights, keys):
        """Compute the weighted sum of this rank's experts, for normed rows.

        placed: int32[rows, k], `own_experts` for none. keys: of the rows, for dropout.
        """
        if self.fused:
            return self._fused(h, placed, weights)
        places, sources, experts = self._sorted(placed)
        size = sources.shape[0] // experts.shape[0]
        rows = sources // self.chosen  # padding of a block has one source past the last, so one row past the last
        blocks = self.to_blocks(h, rows, places).reshape((experts.shape[0], size, h.shape[1]))
        keys = _block_keys(keys, rows, h.shape[0]) if self.drops else ()
        inner = self.swiglu(self.w1(blocks, experts, keys), self.w3(blocks, experts, keys))
        out = self.w2(inner, experts, keys)
        each = self.from_blocks(out.reshape((-1, h.shape[1])), places, sources)
        y = each * expand(weights.reshape((-1, 1)).astype(each.dtype), each.shape)
        return y.reshape((-1, self.chosen, h.shape[1])).sum(1)

    def _replayed(self, chosen, routing):
        """Take the experts that a routing has for these rows, if any."""
        known = routing[routing.shape[0] - chosen.shape[0] :, self.first : self.end]
        return ops.select(known < self.experts, known, chosen)

    def _fused(self, h, placed, weights):
        """Run the fused experts on normed rows."""
        numbers = numbers_of("ExpertNumbers", (("weights", self.present), ("buffers", self.collected)))
        if self.trigger is None:
            return self.form.forward(h, placed, weights, numbers, *self.arrays)[0]
        return self.form(h, placed, weights, numbers, self.arrays, self.buffers, self.trigger)[0]

    def _probabilities(self, h):
        """Compute the router's probabilities of all experts: [rows, hidden] -> float32[rows, experts]."""
        router, h = self.router(h)
        router = router if self.router_trains else ops.stop_gradient(router)
        return ops.softmax(self.linear(h.astype("float32"), router), -1)

    def _sorted(self, placed):
        """Sort choices int32[rows, k] into blocks of one expert each.

        Returns the place of each choice int32[rows * k] among the blocks' rows, M for none; the choice at each of the M
        places, rows * k for none; and the expert of each block.
        """
        choices = placed.shape[0] * self.chosen
        size = block_size(choices, self.own_experts)
        count = block_count(choices, self.own_experts, size)
        numbers = ops.arange(0, self.own_experts).astype("int32").reshape((1, -1))
        shape = (choices, self.own_experts)
        taken = (expand(placed.reshape((-1, 1)), shape) == expand(numbers, shape)).astype("float32")
        taken = ops.stop_gradient(taken)
        before = ops.cumsum(taken, 0)
        load = before[choices - 1]
        ends = ops.cumsum(ops.ceil(load / size), 0)
        starts = (ends * size - ops.ceil(load / size) * size).reshape((1, -1))
        places = (taken * (before + expand(starts, shape))).sum(1) - 1.0
        places = ops.select(taken.sum(1) > 0, places, ops.full_like(places, count * size)).astype("int32")
        empty = ops.full((count * size + 1,), choices).astype("int32")
        order = ops.arange(0, choices).astype("int32")
        sources = ops.tensor_scatter_elements(empty, places, order)[: count * size]
        of_blocks = (count, self.own_experts)
        blocks = ops.arange(0, count).astype("float32").reshape((-1, 1))
        done = (expand(ends.reshape((1, -1)), of_blocks) <= expand(blocks, of_blocks)).astype("int32")
        experts = ops.minimum(done.sum(1), self.own_experts - 1).astype("int32")
        return places, ops.stop_gradient(sources), experts

    def _balance(self, probabilities, load, real):
        tokens = ops.maximum(real.sum(), 1.0)
        mean = (probabilities * expand(real, probabilities.shape)).sum(0) / tokens
        return (load * mean).sum() * (self.experts / self.chosen / self.layers) / tokens


@constexpr
def block_size(choices: int, experts: int) -> int:
    """Choose the rows of a block.

    Fewer rows leave fewer unused, more need fewer copies of matrices.
    """
    best = sqrt(COPY_ROWS * choices / experts)
    return max(LEAST_BLOCK, round(best / BLOCK_UNIT) * BLOCK_UNIT)


@constexpr
def block_count(choices: int, experts: int, size: int) -> int:
    """Count the blocks that any routing needs at most."""
    return min(choices, (choices + experts * (size - 1)) // size)


def real_rows(spans, split: Sequence[int], asking):
    """Mark rows that are no padding: float32[rows, 1], 0 for padding.

    spans, split, asking: as in `Half`.
    """
    n, p, g, r = split
    parts = ()
    if asking != COMPLETIONS:
        parts += (_first(spans[:n], p),)
    if g > 0:
        parts += (_first(spans[n:], r),)
    return ops.concat(parts).reshape((-1, 1)) if len(parts) > 1 else parts[0].reshape((-1, 1))


def _first(lengths, size):
    shape = (lengths.shape[0], size)
    numbers = ops.arange(0, size).astype("int32").reshape((1, -1))
    return (expand(numbers, shape) < expand(lengths.reshape((-1, 1)), shape)).astype("float32").reshape((-1,))


def _gathered(x, index):
    return ops.gather(ops.concat((x, ops.zeros((1, x.shape[1]), x.dtype))), index, 0)


def _block_keys(keys, rows, count):
    """Select the dropout keys of blocks' rows."""
    return ops.gather(keys[keys.shape[0] - count :], ops.minimum(rows, count - 1), 0)
