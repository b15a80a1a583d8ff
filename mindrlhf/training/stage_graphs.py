"""Compiled graphs of one pipeline stage; a whole model is a one-stage pipeline.

Its one stage is both first and last.
Each stage but the last runs forward twice: a backward pass begins from the stage's input alone, so that between the
passes of a micro-batch nothing else is kept (recomputation; Huang et al. 2019, arXiv:1811.06965, section 2.3).

x is the output of the previous stage, [rows, hidden]; the first stage, which begins with token ids, ignores it.
row_keys: see `training.graphs`.
"""

from mindspore import ParameterTuple, nn, ops

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.models.weight import collect_gradients
from mindrlhf.training.graphs import Loss, Stage


class StageForward(Graph):
    """Forward graph of a stage; its output [rows, hidden] is the next stage's x.

    The inputs are (x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys).
    """

    def __init__(self, stage: Stage):
        super().__init__("train/forward", stage.decoder.positions)
        self.stage = stage

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys):
        return self.stage(x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys)


class StageProduct(nn.Cell):
    """Sum of output * d_output, whose gradient at the output is d_output."""

    def __init__(self, stage: Stage):
        super().__init__(auto_prefix=False)
        self.stage = stage

    def construct(self, x, d_output, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys):
        return (self.stage(x, prefix_ids, prefix_lengths, input_ids, lengths, *row_keys) * d_output).sum()


class StageBackward(Graph):
    """Backward graph: `StageForward`'s inputs, with d_output after x -> gradient at x, [rows, hidden].

    Adds the gradients of the stage's parameters into the buffers, in place. d_output: [rows, hidden].
    """

    def __init__(self, product: StageProduct, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__("train/backward", product.stage.decoder.positions)
        self.product = product
        self.run = ops.grad(product, 0, weights=collect_gradients(product, parameters, gradients))

    def construct(self, x, d_output, *fields):
        d_x, done = self.run(x, d_output, *fields)
        return ops.depend(d_x, done)


class LastStageScores(Graph):
    """Graph from a head's inputs to its first output, float32[N*G, R].

    The compiler leaves out computations for other outputs, such as the entropy.
    """

    def __init__(self, head: nn.Cell):
        super().__init__("train/scores", type(head).__name__, head.decoder.positions)
        self.head = head

    def construct(self, x, prefix_ids, prefix_lengths, input_ids, lengths, targets):
        return self.head(x, prefix_ids, prefix_lengths, input_ids, lengths, targets)[0]


class LastStageBackward(Graph):
    """Backward graph of the last stage: `Loss`'s inputs -> (gradient at x, `Loss`'s outputs).

    It adds the gradients into the buffers, in place.
    """

    def __init__(self, loss: Loss, parameters: ParameterTuple, gradients: ParameterTuple):
        super().__init__("train/loss", type(loss.head).__name__, loss.head.decoder.positions)
        self.loss = loss  # its parameters are this graph's, which a graph of the cache is given by name
        trigger = collect_gradients(loss, parameters, gradients)
        self.run = ops.value_and_grad(loss, 0, weights=trigger, has_aux=True)

    def construct(self, x, *fields):
        out, (d_x, done) = self.run(x, *fields)
        return ops.depend(d_x, done), out
