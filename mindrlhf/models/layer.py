"""Decoder layers, and the halves that they are made of."""

from collections.abc import Callable, Mapping

from mindspore import nn

from mindrlhf.models.families import FAMILIES
from mindrlhf.models.halves import ALL_ROWS, NO_ROWS, AttentionHalf, FeedForwardHalf, Half, Materials

HALVES: Mapping[str, Callable[[str, Materials], Half]] = {
    "attention": AttentionHalf,
    "feed_forward": FeedForwardHalf,
}
"""Halves by the names that families choose from (`Family.halves`)."""


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

        Returns the rows `asking`, and keys and values of all rows: see `AttentionHalf`.
        """
        x, key, value = self.attention(x, given, split, asking)
        if asking == NO_ROWS:
            return x, key, value
        return self.feed_forward(x, given, split, asking), key, value

    def decode(self, x, given, keys, values):
        """Run one new position of each slot: [B, hidden] -> [B, hidden]."""
        return self.feed_forward.decode(self.attention.decode(x, given, keys, values), given)
