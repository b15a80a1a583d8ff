"""The compiled graphs of one pipeline stage. Each stage but the last runs forward twice: a backward pass begins from
the stage's input alone, so that between the passes of a micro-batch nothing else is kept (recomputation; Huang et al.
2019, arXiv:1811.06965, section 2.3).

x is what the stage before gave, [rows, hidden]; the first stage, which begins with token ids, ignores it.
"""

from mindspore import ParameterTuple, nn, ops

from mindrlhf.backend.graph import Graph
from mindrlhf.models.transformer import Decoder
from mindrlhf.models.weight import collect_gradients
from mindrlhf.training.graphs import Loss


class StageForward(Graph):
    """(x, prefix_ids, prefix_lengths, input_ids, lengths) -> [rows, hidden], what the next stage begins with."""

    def __init__(self, decoder: Decoder):
        super().__init__()
        self.decoder, self.is_first = decoder, decoder.is_first

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths):
        if self.is_first:
            x = self.decoder.tokens(prefix_ids, input_ids)
        return self.decoder.stage(prefix_ids, prefix_lengths, input_ids, lengths, x)


class StageProduct(nn.Cell):
    """The sum of output * d_output: its gradients are those of a loss whose gradient at the output is d_output."""

    def __init__(self, forward: StageForward):
        super().__init__(auto_prefix=False)
        self.forward = forward

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, d_output):
        return (self.forward(x, prefix_ids, prefix_lengths, input_ids, lengths) * d_output).sum()


class StageBackward(Graph):
    """`StageForward`'s inputs and d_output [rows, hidden] -> the gradient at x, [rows, hidden].

    Adds the gradients of the stage's parameters into the buffers, in place.
    """

    def __init__(self, product: StageProduct, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__()
        self.product = product
        self.run = ops.grad(product, 0, weights=collect_gradients(product, parameters, gradients))

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, d_output):
        d_x, done = self.run(x, prefix_ids, prefix_lengths, input_ids, lengths, d_output)
        return ops.depend(d_x, done)


class LastStageScores(Graph):
    """(x, prefix_ids, prefix_lengths, input_ids, lengths, targets) -> the head's first output, float32[N*G, R]."""

    def __init__(self, head: nn.Cell):
        super().__init__()
        self.head = head

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets):
        return self.head.from_stage(prefix_ids, prefix_lengths, input_ids, lengths, x, targets)[0]


class LastStageLoss(nn.Cell):
    """x and then `Loss`'s inputs -> what `Loss` returns."""

    def __init__(self, loss: Loss):
        super().__init__(auto_prefix=False)
        self.loss = loss

    def construct(self, x, *fields):
        return self.loss.from_stage(x, *fields)


class LastStageBackward(Graph):
    """x and then `Loss`'s inputs -> (the gradient at x, what `Loss` returns); adds the gradients into the buffers."""

    def __init__(self, loss: LastStageLoss, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__()
        self.loss = loss
        trigger = collect_gradients(loss, parameters, gradients)
        self.run = ops.value_and_grad(loss, 0, weights=trigger, has_aux=True)

    def construct(self, x, *fields):
        out, (d_x, done) = self.run(x, *fields)
        return ops.depend(d_x, done), out
