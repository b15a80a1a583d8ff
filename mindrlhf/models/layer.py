"""Decoder layers, and the halves that they are made of."""

from collections.abc import Iterable, Mapping

from mindspore import nn

from mindrlhf.configs.model import ModelConfig
from mindrlhf.models.experts import ExpertsHalf
from mindrlhf.models.families import FAMILIES
from mindrlhf.models.halves import ALL_ROWS, NO_ROWS, AttentionHalf, FeedForwardHalf, Half, Materials

HALVES: Mapping[str, type[Half]] = {
    "attention": AttentionHalf,
    "feed_forward": FeedForwardHalf,
    "experts": ExpertsHalf,
}
"""Halves by the names that families choose from (`Family.halves`)."""

Side = tuple[int | None, str]  # a side output: its layer, None for the head, and its name


def side_outputs(config: ModelConfig, layers: Iterable[int], records: bool = False) -> tuple[Side, ...]:
    """List the side outputs of layers, in the order in which they return them.

    records: with those of decoders that record the routing.
    """
    halves = ((layer, HALVES[name]) for layer in layers for name in FAMILIES[config.family].halves(config, layer))
    return tuple((layer, side) for layer, half in halves for side in (*half.sides, *(half.recorded if records else ())))


class ScaleGradient(nn.Cell):
    """Identity whose gradient is multiplied by `factor`."""

    def __init__(self, factor: float):
        super().__init__(auto_prefix=False)
        self.factor = factor

    def construct(self, x):
        return x

    def bprop(self, x, out, dout):
        return (dout * self.factor,)


class Layer(nn.Cell):
    """Decoder layer of the two halves that the family chooses."""

    def __init__(self, given: Materials):
        super().__init__(auto_prefix=False)
        attention, feed_forward = FAMILIES[given.config.family].halves(given.config, given.layer)
        self.attention = HALVES[attention](attention, given)
        self.feed_forward = HALVES[feed_forward](feed_forward, given)

    def construct(self, x, given, split, asking=ALL_ROWS):
        """Run both halves on x [rows, hidden].

        given: the layer's inputs (`models.inputs`).

        Returns the rows `asking`, keys and values of all rows, and the side outputs: see `AttentionHalf`.
        """
        x, key, value, sides = self.attention(x, given, split, asking)
        if asking == NO_ROWS:
            return x, key, value, sides
        x, more = self.feed_forward(x, given, split, asking)
        return x, key, value, sides + more

    def decode(self, x, given, keys, values):
        """Run one new position of each slot: [B, hidden] -> [B, hidden]."""
        return self.feed_forward.decode(self.attention.decode(x, given, keys, values), given)
