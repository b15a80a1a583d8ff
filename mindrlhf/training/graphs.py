"""Training graphs as Cells: heads over a decoder, and the loss.

x is the output of the previous pipeline stage, [rows, hidden]; the first stage, which begins with token ids,
ignores it. row_keys: the keys int32[T] of `TrainBatch`'s positions, prompts first, or nothing without dropout.
"""

from mindspore import nn, ops

from mindrlhf.models.decoder import Decoder
from mindrlhf.models.head import CHUNK_NUMBERS, TokenLogProbs, TokenValues
from mindrlhf.training.objective import Objective

# A head is a Cell with a `stage`, called as
# (x, prefix_ids [N, P], prefix_lengths [N], input_ids [N*G, R], lengths [N*G], targets [N*G, R], *row_keys) -> a tuple
# of float32[N*G, R], of which values past each length are undefined.


class Stage(nn.Cell):
    """Layers of a decoder, with the result of `Decoder.stage`.

    The inputs are (x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys).
    """

    def __init__(self, decoder: Decoder):
        super().__init__(auto_prefix=False)
        self.decoder, self.is_first = decoder, decoder.is_first

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys):
        if self.is_first:
            x = self.decoder.tokens(prefix_ids, input_ids)
        return self.decoder.stage(prefix_ids, prefix_lengths, input_ids, lengths, x, *row_keys)


class PolicyLogProbs(nn.Cell):
    """Head with outputs (log_probs, entropy). entropy_gradient: see `TokenLogProbs`."""

    def __init__(
        self,
        decoder: Decoder,
        temperature: float,
        chunk_numbers: int = CHUNK_NUMBERS,
        entropy_gradient: bool = False,
    ):
        super().__init__(auto_prefix=False)
        self.decoder, self.stage = decoder, Stage(decoder)
        self.token_log_probs = TokenLogProbs(
            temperature, chunk_numbers, decoder.shards, entropy_gradient, decoder.kernels.fused, decoder.head_trains
        )

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets, *row_keys):
        rows = self.stage(x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys)
        hidden, head = self.decoder.with_head(rows)
        used = ops.arange(0, targets.shape[1]).reshape((1, -1)) < lengths.reshape((-1, 1))
        flat = targets.reshape((-1,)), used.astype("int32").reshape((-1,))
        out = self.token_log_probs(hidden, head, *flat)
        return out[0].reshape(targets.shape), out[1].reshape(targets.shape)


class Values(nn.Cell):
    """Head of a critic with output (values,).

    A token's value estimates the return before it is drawn.
    """

    def __init__(self, decoder: Decoder):
        super().__init__(auto_prefix=False)
        self.decoder, self.stage = decoder, Stage(decoder)
        self.token_values = TokenValues(decoder.shards)

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets, *row_keys):
        rows = self.stage(x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys)
        hidden, head = self.decoder.with_head(rows)
        return (self.token_values(hidden, head).reshape(targets.shape),)


class Loss(nn.Cell):
    """Weighted sum of losses, the head's first output, and the objective's metrics.

    The metrics are in the objective's order: MindSpore would return a dictionary through Python. fields: the
    objective's, each float32[B, R], and row_keys.
    """

    def __init__(self, head: nn.Cell, objective: Objective):
        super().__init__(auto_prefix=False)
        self.head, self.losses, self.field_count = head, objective.losses, len(objective.fields)

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets, mask, weights, *fields):
        fields, row_keys = fields[: self.field_count], fields[self.field_count :]
        outputs = self.head(x, prefix_ids, prefix_lengths, input_ids, lengths, targets, *row_keys)
        losses, metrics = self.losses(outputs, mask, *fields)
        return (losses * weights).sum(), outputs[0], tuple(metrics.values())
