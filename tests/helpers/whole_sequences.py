"""A decoder's final hidden states with every row a whole sequence and nothing shared: an oracle of its other forms."""

from mindspore import Tensor, nn, ops


def batch_inputs(prefix_ids, prefix_lengths, input_ids, lengths):
    """The inputs of a decoder's graphs, for use in a graph: completions go on where their prompt ends."""
    (n, p), (rows, r) = prefix_ids.shape, input_ids.shape
    starts = ops.tile(prefix_lengths.reshape((n, 1, 1)), (1, rows // n, 1))
    own = (starts + ops.arange(0, r).reshape((1, 1, r))).reshape((-1,))
    positions = ops.concat((ops.tile(ops.arange(0, p), (n,)), own)).astype("int32")
    return prefix_ids, prefix_lengths, input_ids, lengths, positions


def whole_sequences(decoder, ids):
    """ids int32[B, S], right-padded -> final hidden states [B*S, hidden], for use in a graph."""
    b, s = ids.shape
    split, lengths = (b, s, 0, 0), ops.full((b,), s).astype("int32")
    positions = ops.tile(ops.arange(0, s), (b,)).astype("int32")
    given = decoder.layer_inputs((ids, lengths, (), lengths, positions), split)
    x = decoder.embed(ids.reshape((-1,)))
    for layer in decoder.layers:
        x = layer(x, given, split)[0]
    return decoder.final_norm(x)


class _Logits(nn.Cell):
    def __init__(self, decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder

    def construct(self, ids):
        return self.decoder.logits(whole_sequences(self.decoder, ids))


def compiled_logits(model, operators=None):
    """A small model's compiled form of whole sequences: (int[B, S]) -> float32[B, S, vocab]."""
    graph = _Logits(model.build(operators=operators)[0])
    return lambda ids: graph(Tensor(ids.astype("int32"))).asnumpy().reshape((*ids.shape, -1))
