"""Heads on hidden states: log-probs of given tokens, and a critic's values.

Logits [tokens, vocabulary] are never held whole when they are large.
"""

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops import constexpr

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.operators import Operators
from mindrlhf.models import chunks
from mindrlhf.models.allowed_tokens import without
from mindrlhf.models.chunks import CHUNK_NUMBERS

chunk_count = constexpr(chunks.chunk_count)


def log_from_one(x):
    """ln x for float32 x >= 1.

    Not with `ops.log`: on CPU it times its first calls to choose how to cut its work, and rounds the numbers at the end
    of a cut differently, so that the last bits depend on how often a process has called it and how fast it ran. `log1p`
    does neither, and is more exact.
    """
    return ops.log1p(x - 1.0)


class TokenLogProbs(nn.Cell):
    """Log-probs of targets and entropies, in nats and float32.

    They are log softmax(hidden @ head^T / temperature)[target] and the entropy of that distribution.

    hidden [T, H], head [V, H], targets int32[T], used int32[T] -> log_probs float32[T], entropy float32[T]. used: 0 for
    tokens whose results are not read and whose gradients are 0; they may be skipped, with any finite numbers as
    results. entropy_gradient: gradients flow through the entropy; otherwise it is for reading only. head_trains: head
    gets a gradient.

    operators: fused ones add the head's gradient to its buffer (`Weight.collected`); compositions of basic operators,
    also by default, return it. never_drawn: tokens without a probability (`models.allowed_tokens`), which the fused
    ones do not know.
    shards: the ranks that share the vocabulary, one block of head's rows each, in rank order. A rank has the logits of
    its own block; the ranks exchange four numbers for each token, and the gradient of hidden is this rank's term of a
    sum (after Shoeybi et al. 2019, arXiv:1909.08053, section 3, who reduce the loss instead of log-probs and entropy).

    A single chunk keeps its logits from the forward pass. Several chunks keep nothing and multiply again in the
    backward pass: a third more work on the head, but memory of one chunk. Each chunk waits for the one before
    (`ops.depend`): the runtime starts operators without dependencies first, and would hold the logits of all. The
    gradients are explicit, with p the softmax: d log_prob / d logits = (onehot(target) - p) / temperature and d entropy
    / d logits = -p (log p + entropy) / temperature.
    """

    def __init__(
        self,
        temperature: float,
        chunk_numbers: int = CHUNK_NUMBERS,
        shards: TensorParallel | None = None,
        entropy_gradient: bool = False,
        operators: Operators | None = None,
        head_trains: bool = True,
        never_drawn: Tensor | None = None,
    ):
        super().__init__(auto_prefix=False)
        self.entropy_gradient = entropy_gradient
        self.never_drawn = never_drawn
        shards = shards or TensorParallel()
        # Fused operators read whole rows of logits.
        self.fused = shards.size == 1 and operators is not None and operators.fused and never_drawn is None
        if self.fused:
            self.fused_log_probs = operators.token_log_probs
            self.fused_gradient = operators.token_log_probs_gradient
            self.inverse_tensor = Tensor(np.array([1.0 / temperature], np.float32))
        self.collects = head_trains and self.fused
        self.sums_head = head_trains and not self.fused
        self.rank = shards.rank
        self.size = shards.size
        self.stack_ranks = shards.stack
        self.inverse = 1.0 / temperature
        self.chunk_numbers = chunk_numbers
        self.forward_product = ops.MatMul(transpose_b=True)
        self.hidden_product = ops.MatMul()
        self.head_product = ops.MatMul(transpose_a=True)
        self.scatter = ops.TensorScatterAdd()

    def _logits(self, hidden, head):
        """Compute logits, divided by the temperature."""
        logits = self.forward_product(hidden, head.astype(hidden.dtype)).astype("float32") * self.inverse
        return without(logits, self.never_drawn)

    def _column(self, values, logits):
        """Repeat [T] to [T, V]."""
        return expand(values.reshape((-1, 1)), logits.shape)

    def _place(self, targets, rows):
        """Convert targets to this rank's rows.

        Returns row indices (0 for other ranks' targets), and float32, 1 for this rank's targets.
        """
        if self.size == 1:
            return targets, ops.ones_like(targets).astype("float32")
        local = targets - self.rank * rows
        own = ops.logical_and(local >= 0, local < rows)
        return ops.select(own, local, ops.zeros_like(local)), own.astype("float32")

    def _forward(self, hidden, head, targets, used):
        """Compute log_probs, entropy and log of the partition sum [T], and logits.

        The logits [T, V] are for `_backward` alone.
        """
        if self.fused:
            return self.fused_log_probs(hidden, head, targets, used, self.inverse_tensor)
        logits = self._logits(hidden, head)
        return (*self._statistics(logits, targets), logits)

    def _statistics(self, logits, targets):
        top = logits.max(-1, keepdims=True)
        exponentials = ops.exp(logits - expand(top, logits.shape))
        total = exponentials.sum(-1)
        weighted = (exponentials * logits).sum(-1)
        top = top.reshape((-1,))
        local, own = self._place(targets, logits.shape[1])
        picked = ops.gather_d(logits, 1, local.reshape((-1, 1))).reshape((-1,))
        if self.size > 1:
            every = self.stack_ranks(ops.stack((top, total, weighted, picked * own)))  # [size, 4, T]
            top = every[:, 0].max(0)
            scales = ops.exp(every[:, 0] - top)
            total, weighted = (every[:, 1] * scales).sum(0), (every[:, 2] * scales).sum(0)
            picked = every[:, 3].sum(0)
        log_total = log_from_one(total) + top
        return picked - log_total, log_total - weighted / total, log_total

    def _backward(self, hidden, head, targets, used, logits, entropy, log_total, d_log_prob, d_entropy, collected):
        """Compute the gradients of hidden and head.

        The head's gradient is any array if the head does not train or has a gradient buffer.
        """
        if self.fused:  # overwrites the logits
            slope = d_entropy if self.entropy_gradient else d_entropy * 0.0
            inputs = (hidden, head, targets, used, self.inverse_tensor, entropy, log_total, logits, d_log_prob, slope)
            return self.fused_gradient(*inputs, collected[0] if self.collects else d_log_prob), head
        every_log_prob = logits - self._column(log_total, logits)
        factor = self._column(-d_log_prob, logits)
        if self.entropy_gradient:
            factor = factor - self._column(d_entropy, logits) * (every_log_prob + self._column(entropy, logits))
        d_logits = ops.exp(every_log_prob) * factor
        rows = ops.arange(0, targets.shape[0]).astype("int32")
        local, own = self._place(targets, logits.shape[1])
        d_logits = self.scatter(d_logits, ops.stack((rows, local), 1), d_log_prob * own) * self.inverse
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden = self.hidden_product(d_logits, head.astype(hidden.dtype))
        return d_hidden, self.head_product(d_logits, hidden).astype(head.dtype) if self.sums_head else head

    def _sum_of_head(self, total, part):
        """Add a chunk's gradient of the head.

        It is a method because graphs that collect gradients do not compile with an `if` in the loop of `bprop`.
        """
        return total + part if self.sums_head else total

    def construct(self, hidden, head, targets, used, collected=()):
        """Compute log-probs and entropy, and arrays for the backward pass.

        collected: see `Weight.collected`.
        Returns (log_probs [T], entropy [T], log of the partition sum [T], kept logits [T, V] or an empty [0]).
        """
        for array in collected:  # as in a fused half of a layer
            hidden = ops.depend(hidden, array)
        tokens = hidden.shape[0]
        size = tokens // chunk_count(tokens, head.shape[0], self.chunk_numbers)
        if size == tokens:
            return self._forward(hidden, head, targets, used)
        log_probs = ()
        entropy = ()
        log_total = ()
        for start in range(0, tokens, size):
            rows = hidden[start : start + size]
            rows = ops.depend(rows, log_probs[-1]) if start else rows
            part = self._forward(rows, head, targets[start : start + size], used[start : start + size])
            log_probs = (*log_probs, part[0])
            entropy = (*entropy, part[1])
            log_total = (*log_total, part[2])
        return ops.concat(log_probs), ops.concat(entropy), ops.concat(log_total), ops.zeros((0,), log_total[0].dtype)

    def bprop(self, hidden, head, targets, used, collected, out, d_out):
        tokens = hidden.shape[0]
        size = tokens // chunk_count(tokens, head.shape[0], self.chunk_numbers)
        if size == tokens:
            inputs = (hidden, head, targets, used, out[3], out[1], out[2], d_out[0], d_out[1], collected)
            d_hidden, d_head = self._backward(*inputs)
            return d_hidden, d_head, *self._rest(targets, used, collected, d_hidden)
        d_hiddens = ()
        d_head = ops.zeros_like(head) if self.sums_head else head
        rows = (hidden, targets, used, out[1], out[2], d_out[0], d_out[1])
        for start in range(0, tokens, size):
            before = (d_head if self.sums_head else d_hiddens[-1]) if start else d_out[0]
            x, ids, some, entropy, log_total, d_log_prob, d_entropy = [
                ops.depend(row[start : start + size], before) for row in rows
            ]
            logits = self._forward(x, head, ids, some)[3] if self.fused else self._logits(x, head)
            part = self._backward(x, head, ids, some, logits, entropy, log_total, d_log_prob, d_entropy, collected)
            d_hiddens += (part[0],)
            d_head = self._sum_of_head(d_head, part[1])
        d_hidden = ops.concat(d_hiddens)
        return d_hidden, d_head, *self._rest(targets, used, collected, d_hidden)

    def _rest(self, targets, used, collected, d_hidden):
        """Return placeholders for the gradients of the other inputs.

        The trigger's gradient waits until the head's gradient is in its buffer.
        """
        if self.collects:
            collected = (collected[0], ops.depend(collected[1], d_hidden))
        return ops.zeros_like(targets), ops.zeros_like(used), collected


class TokenValues(nn.Cell):
    """Values of hidden states: [T, H], head [1, H] -> float32[T].

    shards: the ranks that share the head, one block of its columns each, in rank order; a rank reads its own columns of
    hidden, so that the gradient of hidden is its term of a sum, as in `TokenLogProbs`.
    """

    def __init__(self, shards: TensorParallel | None = None):
        super().__init__(auto_prefix=False)
        shards = shards or TensorParallel()
        self.rank = shards.rank
        self.size = shards.size
        self.reduce = shards.reduce
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, hidden, head):
        columns = head.shape[1]
        if self.size > 1:
            hidden = hidden[:, self.rank * columns : (self.rank + 1) * columns]
        return self.reduce(self.product(hidden.astype("float32"), head.astype("float32"))).reshape((-1,))
