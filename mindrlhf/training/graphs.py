"""Training graphs: heads over a decoder, the loss, and a pipeline stage's compiled graphs.

A whole model is a pipeline of one stage, both first and last. Each stage except the last runs forward twice: its
backward pass starts from the stage's input, so that only this input is kept between the passes of a micro-batch
(recomputation; Huang et al. 2019, arXiv:1811.06965, section 2.3).

A stage's inputs are x, and a batch's arrays in the order of `Decoder.inputs`: flat in a graph's arguments, a tuple
inside of it (`models.inputs`). x is the output of the previous stage, [rows, hidden]; the first stage, which begins
with token ids, ignores it.

A head is a Cell with a `stage`. It takes targets [N*G, R] too, and returns a tuple of float32[N*G, R], undefined past
each length, and a tuple of side outputs: its layers', and those of its own. `sides` names them in order.
"""

from collections.abc import Sequence
from typing import Protocol

from mindspore import Parameter, nn, ops

from mindrlhf.backend.compile.graph import Graph
from mindrlhf.models.decoder import Decoder
from mindrlhf.models.head import CHUNK_NUMBERS, TokenLogProbs, TokenValues
from mindrlhf.models.inputs import LENGTHS
from mindrlhf.models.layer import ScaleGradient, Side
from mindrlhf.models.weight import collect_gradients
from mindrlhf.training.objective import Objective


class GradientBuffers(Protocol):
    """Parameters that train, and the buffers to which backward passes add their gradients."""

    parameters: Sequence[Parameter]
    gradients: Sequence[Parameter]


class Stage(nn.Cell):
    """Layers of a decoder: rows [rows, hidden] and side outputs (`Decoder.stage`).

    Rows are in the dtype of activations, and float32 between stages, for NumPy has no bfloat16. rounds: they differ.
    """

    def __init__(self, decoder: Decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.is_first = decoder.is_first
        self.dtype = decoder.dtype
        self.rounds = decoder.operators.activations != "float32"

    def construct(self, x, inputs):
        if self.is_first:
            x = self.decoder.tokens(inputs)
        elif self.rounds:
            x = x.astype(self.dtype)
        return self.decoder.stage(inputs, x)

    def sent(self, rows):
        """Return rows as they are between stages."""
        return rows.astype("float32") if self.rounds else rows


class PolicyLogProbs(nn.Cell):
    """Head with outputs (log_probs, entropy).

    entropy_gradient: see `TokenLogProbs`. every_token: also tokens that generation never draws have a probability.
    """

    def __init__(
        self,
        decoder: Decoder,
        temperature: float,
        chunk_numbers: int = CHUNK_NUMBERS,
        entropy_gradient: bool = False,
        every_token: bool = False,
    ):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.stage = Stage(decoder)
        self.sides = decoder.sides
        self.token_log_probs = TokenLogProbs(
            temperature,
            chunk_numbers,
            decoder.shards,
            entropy_gradient,
            decoder.operators,
            decoder.head_trains,
            None if every_token else decoder.never_drawn,
        )

    def construct(self, x, inputs, targets):
        rows, sides = self.stage(x, inputs)
        if self.token_log_probs.fused:
            hidden, head, collected = self.decoder.with_fused_head(rows)
        else:
            hidden, head = self.decoder.with_head(rows)
            collected = ()
        used = ops.arange(0, targets.shape[1]).reshape((1, -1)) < inputs[LENGTHS].reshape((-1, 1))
        flat = targets.reshape((-1,)), used.astype("int32").reshape((-1,))
        out = self.token_log_probs(hidden, head, *flat, collected)
        return (out[0].reshape(targets.shape), out[1].reshape(targets.shape)), sides


class Values(nn.Cell):
    """Head of a critic with output (values,).

    A token's value estimates the return before the token is drawn.
    """

    def __init__(self, decoder: Decoder):
        super().__init__(auto_prefix=False)
        self.decoder = decoder
        self.stage = Stage(decoder)
        self.sides = decoder.sides
        self.token_values = TokenValues(decoder.shards)

    def construct(self, x, inputs, targets):
        rows, sides = self.stage(x, inputs)
        hidden, head = self.decoder.with_head(rows)
        return (self.token_values(hidden, head).reshape(targets.shape),), sides


class Terms(nn.Cell):
    """Sum of an objective's terms from one stage's side outputs: float32[].

    weight: float32[], the sum of all tokens' weights, by which it is multiplied.
    """

    def __init__(self, objective: Objective, sides: Sequence[Side], ranks: int):
        super().__init__(auto_prefix=False)
        named = dict(objective.terms)
        self.places = tuple((i, named[name]) for i, (_, name) in enumerate(sides) if name in named)
        self.present = bool(self.places)
        # Every tensor-parallel rank computes the whole term, and their gradients are summed.
        self.one_of_ranks = ScaleGradient(1.0 / ranks) if ranks > 1 else nn.Identity()

    def construct(self, sides, weight):
        total = 0.0
        for i, coefficient in self.places:
            total = total + coefficient * self.one_of_ranks(sides[i]) * weight
        return total


class Loss(nn.Cell):
    """Weighted sum of losses and terms, the head's first output, and metrics.

    Metrics and side outputs are one tuple, in the order of the objective and the head: MindSpore would return a
    dictionary through Python. arrays: the decoder's inputs, then the objective's fields, each float32[B, R].
    """

    def __init__(self, head: nn.Cell, objective: Objective):
        super().__init__(auto_prefix=False)
        self.head = head
        self.losses = objective.losses
        self.count = len(head.decoder.inputs)
        self.terms = Terms(objective, head.sides, head.decoder.shards.size)

    def construct(self, x, targets, mask, weights, *arrays):
        outputs, sides = self.head(x, arrays[: self.count], targets)
        losses, metrics = self.losses(outputs, mask, *arrays[self.count :])
        total = (losses * weights).sum()
        if self.terms.present:
            total = total + self.terms(sides, weights.sum())
        return total, outputs[0], (*metrics.values(), *sides)


class StageForward(Graph):
    """Forward graph of a stage: the next stage's x, and its side outputs.

    x is [rows, hidden]. All are one tuple.
    """

    def __init__(self, stage: Stage):
        super().__init__("train/forward", stage.decoder.positions, stage.decoder.records)
        self.stage = stage

    def construct(self, x, *arrays):
        rows, sides = self.stage(x, arrays)
        return (self.stage.sent(rows), *sides)


class StageProduct(nn.Cell):
    """Sum of output * d_output, whose gradient is d_output, and of terms.

    weight: float32[], the sum of the tokens' weights.
    """

    def __init__(self, stage: Stage, objective: Objective):
        super().__init__(auto_prefix=False)
        self.stage = stage
        self.terms = Terms(objective, stage.decoder.sides, stage.decoder.shards.size)

    def construct(self, x, d_output, weight, *arrays):
        rows, sides = self.stage(x, arrays)
        product = (self.stage.sent(rows) * d_output).sum()
        return product + self.terms(sides, weight) if self.terms.present else product


class StageBackward(Graph):
    """Backward graph of a stage -> gradient at x.

    It adds the gradients of the stage's parameters to the optimizer's buffers. Inputs: x, d_output [rows, hidden],
    weight (see `StageProduct`), and the batch's arrays.
    """

    def __init__(self, stage: Stage, objective: Objective, optimizer: GradientBuffers):
        super().__init__("train/backward", stage.decoder.positions, stage.decoder.records)
        self.product = StageProduct(stage, objective)
        trigger = collect_gradients(self.product, optimizer.parameters, optimizer.gradients)
        self.run = ops.grad(self.product, 0, weights=trigger)

    def construct(self, *inputs):
        d_x, done = self.run(*inputs)
        return ops.depend(d_x, done)


class LastStageScores(Graph):
    """Graph of a head's first output and the side outputs.

    Inputs: x, targets and a batch's arrays.

    All are one tuple. It drops the head's other outputs, and without a recorded routing the side outputs.
    """

    def __init__(self, head: nn.Cell):
        decoder = head.decoder
        super().__init__("train/scores", type(head).__name__, decoder.positions, decoder.records)
        self.head = head
        self.records = decoder.records

    def construct(self, x, targets, *arrays):
        outputs, sides = self.head(x, arrays, targets)
        return (outputs[0], *sides) if self.records else (outputs[0],)


class LastStageBackward(Graph):
    """Backward graph of the last stage: `Loss`'s inputs -> (gradient at x, `Loss`'s outputs).

    It adds the gradients to the buffers, in place.
    """

    def __init__(self, loss: Loss, optimizer: GradientBuffers):
        decoder = loss.head.decoder
        super().__init__("train/loss", type(loss.head).__name__, decoder.positions, decoder.records)
        self.loss = loss  # so that its parameters are this graph's: a cached graph gets them by name
        trigger = collect_gradients(loss, optimizer.parameters, optimizer.gradients)
        self.run = ops.value_and_grad(loss, 0, weights=trigger, has_aux=True)

    def construct(self, x, *fields):
        out, (d_x, done) = self.run(x, *fields)
        return ops.depend(d_x, done), out
