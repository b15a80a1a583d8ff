"""The compiled graphs of one pipeline stage; a whole model is a pipeline of one stage, its first and its last.

Each stage but the last runs forward twice: a backward pass begins from the stage's input alone, so that between the
passes of a micro-batch nothing else is kept (recomputation; Huang et al. 2019, arXiv:1811.06965, section 2.3).

x is what the stage before gave, [rows, hidden]; the first stage, which begins with token ids, ignores it.
"""

from mindspore import ParameterTuple, nn, ops

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.models.weight import collect_gradients
from mindrlhf.training.graphs import Loss, Stage


class StageForward(Graph):
    """Compute (x, prefix_ids, prefix_lengths, input_ids, lengths) -> [rows, hidden], the next stage's x."""

    def __init__(self, stage: Stage):
        super().__init__()
        self.stage = stage

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths):
        return self.stage(x, prefix_ids, prefix_lengths, input_ids, lengths)


class StageProduct(nn.Cell):
    """The sum of output * d_output: its gradients are those of a loss whose gradient at the output is d_output."""

    def __init__(self, stage: Stage):
        super().__init__(auto_prefix=False)
        self.stage = stage

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, d_output):
        return (self.stage(x, prefix_ids, prefix_lengths, input_ids, lengths) * d_output).sum()


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
    """A head's inputs -> its first output, float32[N*G, R].

    The compiler leaves out what only other outputs need, such as the entropy.
    """

    def __init__(self, head: nn.Cell):
        super().__init__()
        self.head = head

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets):
        return self.head(x, prefix_ids, prefix_lengths, input_ids, lengths, targets)[0]


class LastStageBackward(Graph):
    """`Loss`'s inputs -> (the gradient at x, what `Loss` returns); adds the gradients into the buffers, in place."""

    def __init__(self, loss: Loss, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__()
        self.loss = loss  # its parameters are this graph's, which a graph of the cache is given by name
        trigger = collect_gradients(loss, parameters, gradients)
        self.run = ops.value_and_grad(loss, 0, weights=trigger, has_aux=True)

    def construct(self, x, *fields):
        out, (d_x, done) = self.run(x, *fields)
        return ops.depend(d_x, done), out
