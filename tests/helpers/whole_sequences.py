"""A decoder's final hidden states with every row a whole sequence and nothing shared: an oracle of its other forms."""

from mindspore import Tensor, nn, ops


def whole_sequences(decoder, ids):
    """ids int32[B, S], right-padded -> final hidden states [B*S, hidden], for use in a graph."""
    b, s = ids.shape
    split, lengths = (b, s, 0, 0), ops.full((b,), s).astype("int32")
    places = decoder.places(ops.tile(ops.arange(0, s), (b,)), lengths, lengths, split)
    x = decoder.embed(ids.reshape((-1,)))
    for layer in decoder.layers:
        x = layer(x, places, split)[0]
    return decoder.final_norm(x)


class _Logits(nn.Cell):
    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, ids):
        return self.decoder.logits(whole_sequences(self.decoder, ids))


def compiled_logits(model, kernels=None):
    """A small model's compiled form of whole sequences: (int[B, S]) -> float32[B, S, vocab]."""
    graph = _Logits(model.build(kernels=kernels)[0])
    return lambda ids: graph(Tensor(ids.astype("int32"))).asnumpy().reshape((*ids.shape, -1))
