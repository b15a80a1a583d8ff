"""The compiled graphs of training: token log-probs, and loss with gradients, of a whole model or of one stage."""

from mindspore import ParameterTuple, nn, ops

from mindrlhf.backend.graph import Graph
from mindrlhf.models.head import CHUNK_NUMBERS, TokenLogProbs, TokenValues
from mindrlhf.models.transformer import Decoder
from mindrlhf.models.weight import collect_gradients
from mindrlhf.training.objective import Objective

# What a graph computes of each token is a head: a Cell over a `decoder`, called as
# (prefix_ids [N, P], prefix_lengths [N], input_ids [N*G, R], lengths [N*G], targets [N*G, R]) -> a tuple of
# float32[N*G, R], in which nobody reads what lies behind the lengths.


class PolicyLogProbs(nn.Cell):
    """The head that gives (log_probs, entropy). entropy_gradient: see `TokenLogProbs`."""

    def __init__(
        self,
        decoder: Decoder,
        temperature: float,
        chunk_numbers: int = CHUNK_NUMBERS,
        entropy_gradient: bool = False,
    ):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.token_log_probs = TokenLogProbs(
            temperature, chunk_numbers, decoder.shards, entropy_gradient, decoder.kernels
        )

    def construct(self, prefix_ids, prefix_lengths, input_ids, lengths, targets):
        x = self.decoder.tokens(prefix_ids, input_ids)
        return self.from_stage(prefix_ids, prefix_lengths, input_ids, lengths, x, targets)

    def from_stage(self, prefix_ids, prefix_lengths, input_ids, lengths, x, targets):
        """The same from x [rows, hidden], what the stage before the last gave."""
        hidden, head = self.decoder.with_head(self.decoder.stage(prefix_ids, prefix_lengths, input_ids, lengths, x))
        used = ops.arange(0, targets.shape[1]).reshape((1, -1)) < lengths.reshape((-1, 1))
        flat = targets.reshape((-1,)), used.astype("int32").reshape((-1,))
        out = self.token_log_probs(hidden, head, *flat)
        return out[0].reshape(targets.shape), out[1].reshape(targets.shape)


class Values(nn.Cell):
    """The head of a critic, which gives (values,): of each token, what is still to come before it is drawn."""

    def __init__(self, decoder: Decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.token_values = TokenValues(decoder.shards)

    def construct(self, prefix_ids, prefix_lengths, input_ids, lengths, targets):
        x = self.decoder.tokens(prefix_ids, input_ids)
        return self.from_stage(prefix_ids, prefix_lengths, input_ids, lengths, x, targets)

    def from_stage(self, prefix_ids, prefix_lengths, input_ids, lengths, x, targets):
        """The same from x [rows, hidden], what the stage before the last gave."""
        hidden, head = self.decoder.with_head(self.decoder.stage(prefix_ids, prefix_lengths, input_ids, lengths, x))
        return (self.token_values(hidden, head).reshape(targets.shape),)


class Loss(nn.Cell):
    """Sum over tokens of weights * losses, and what was met on the way: (loss, the head's first output, the values of
    the objective's metrics in their order). A dictionary would leave the graph through Python.

    fields: the objective's, each float32[B, R].
    """

    def __init__(self, head: nn.Cell, objective: Objective):
        super().__init__(auto_prefix=False)
        self.head, self.losses = head, objective.losses

    def construct(self, prefix_ids, prefix_lengths, input_ids, lengths, targets, mask, weights, *fields):
        x = self.head.decoder.tokens(prefix_ids, input_ids)
        return self.from_stage(x, prefix_ids, prefix_lengths, input_ids, lengths, targets, mask, weights, *fields)

    def from_stage(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets, mask, weights, *fields):
        """The same from x [rows, hidden], what the stage before the last gave."""
        outputs = self.head.from_stage(prefix_ids, prefix_lengths, input_ids, lengths, x, targets)
        losses, metrics = self.losses(outputs, mask, *fields)
        return (losses * weights).sum(), outputs[0], tuple(metrics.values())


class Accumulate(Graph):
    """Runs `Loss` and adds its gradients into the buffers, in place. Returns what `Loss` returns."""

    def __init__(self, loss: Loss, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__()
        self.loss = loss  # its parameters are this graph's, which a graph of the cache is given by name
        trigger = collect_gradients(loss, parameters, gradients)
        self.run = ops.value_and_grad(loss, None, weights=trigger, has_aux=True)

    def construct(self, *inputs):
        (loss, output, metrics), done = self.run(*inputs)
        return ops.depend(loss, done), output, metrics
