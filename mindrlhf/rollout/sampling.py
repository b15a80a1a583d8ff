"""Sampling of one token for each slot, inside the decode graph.

Order of the filters: repetition penalty on the logits, temperature, top-k, top-p over top-k's tokens, min-p. The
draw inverts the cumulative distribution at one uniform number. Tensor-parallel ranks draw the same token.
"""

import math

import numpy as np
from mindspore import Tensor, nn, ops

from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.comm.graph_collectives import TensorParallel
from mindrlhf.backend.composed_attention import MASKED
from mindrlhf.configs.grpo import SamplingSettings
from mindrlhf.models.head import log_from_one

# Halvings of the interval that contains the top-p threshold: it is 40 nats wide, and 4e-8 nats at the end.
TOP_P_HALVINGS = 30
TOP_P_RANGE = 40.0


def block_size(vocabulary: int, ranks: int = 1) -> int:
    """Find the block size of the two-level search in a rank's vocabulary.

    It is the divisor of the rank's part nearest to the whole vocabulary's square root: the search reads V/b + b numbers
    of a row.
    """
    part = vocabulary // ranks
    divisors = [b for b in range(1, part + 1) if part % b == 0]
    return min(divisors, key=lambda b: abs(math.log(b * b / vocabulary)))


def draws_in_operator(settings: SamplingSettings, vocabulary: int, ranks: int) -> bool:
    """Test that the operator for several tokens can draw with these settings."""
    filters = 0 < settings.top_k < vocabulary or settings.top_p < 1.0 or settings.min_p > 0.0
    return ranks == 1 and not filters and settings.repetition_penalty == 1.0


class Sampler(nn.Cell):
    """Sampler of tokens from logits float32[B, V] and uniform float32[B].

    The outputs are token int32[B], behaviour log-prob and policy log-prob, float32[B].
    shards: the ranks that share the vocabulary, V / size logits each; every rank returns the same.
    The behaviour log-prob is under the distribution drawn from; the policy log-prob has only the temperature applied.
    Temperature 0 takes the largest logit; its behaviour log-prob is 0 and its policy log-prob is at temperature 1.
    """

    def __init__(
        self,
        settings: SamplingSettings,
        vocabulary: int,
        stop_ids: tuple[int, ...],
        shards: TensorParallel | None = None,
    ):
        super().__init__(auto_prefix=False)
        shards = shards or TensorParallel()
        self.size, self.stack_ranks, self.reduce = shards.size, shards.stack, shards.reduce
        self.first, self.end = shards.share(vocabulary)
        self.greedy = settings.temperature == 0.0
        self.inverse = 1.0 if self.greedy else 1.0 / settings.temperature
        self.top_k = settings.top_k if settings.top_k < vocabulary else 0
        self.top_p, self.min_p = settings.top_p, settings.min_p
        self.penalty = settings.repetition_penalty
        self.bans_stop = settings.min_new_tokens > 0
        stop = np.zeros((1, vocabulary), np.float32)
        stop[0, [i for i in stop_ids if i < vocabulary]] = MASKED
        self.stop_mask = Tensor(stop[:, self.first : self.end].copy())
        self.block = block_size(vocabulary, shards.size)
        self.filters = bool(self.top_k or self.top_p < 1.0 or self.min_p > 0.0)
        self.plain = self.penalty == 1.0 and not self.bans_stop and not self.filters
        self.simple = draws_in_operator(settings, vocabulary, shards.size)
        filters = (self.top_k, self.top_p, self.min_p, self.penalty, self.bans_stop)
        self.rule = (self.greedy, self.inverse, *filters, self.simple, tuple(stop_ids))  # tells samplers apart
        self.stop_ids = Tensor(np.array(stop_ids or (-1,), np.int32))
        self.cumulative = ops.CumSum()
        self.row_max = ops.ReduceMax(True)

    def _largest(self, scores):
        """Take the maximum over the whole vocabulary: [B, V] -> [B, 1]."""
        top = self.row_max(scores, -1)
        return top if self.size == 1 else self.stack_ranks(top).max(0)

    def _total(self, weights):
        """Sum over the whole vocabulary: [B, V] -> [B, 1]."""
        return self.reduce(weights.sum(-1, keepdims=True))

    def _own(self, token):
        """Convert token ids to this rank's indices, with 1 for ids that it has."""
        if self.size == 1:
            return token, ops.ones_like(token).astype("float32")
        own = ops.logical_and(token >= self.first, token < self.end)
        return ops.select(own, token - self.first, ops.zeros_like(token)), own.astype("float32")

    def _kth_largest(self, scores):
        values = ops.topk(scores, min(self.top_k, self.end - self.first))[0]
        if self.size > 1:
            values = self.stack_ranks(values).transpose((1, 0, 2)).reshape((scores.shape[0], -1))
            values = ops.topk(values, self.top_k)[0]
        return values[:, self.top_k - 1 : self.top_k]

    def _keep(self, scores):
        """Set scores that top-k, top-p or min-p exclude to MASKED."""
        top = self._largest(scores)
        if self.top_k:
            scores = ops.select(scores >= self._kth_largest(scores), scores, ops.full_like(scores, MASKED))
        if self.top_p < 1.0:
            weights = ops.exp(scores - expand(top, scores.shape))
            target = self._total(weights) * self.top_p
            low, high = top - TOP_P_RANGE, top  # tokens above `low` have the mass; tokens above `high` may not
            for _ in range(TOP_P_HALVINGS):
                middle = (low + high) * 0.5
                enough = self._total(ops.select(scores >= middle, weights, ops.zeros_like(weights))) >= target
                low, high = ops.select(enough, middle, low), ops.select(enough, high, middle)
            scores = ops.select(scores >= low, scores, ops.full_like(scores, MASKED))
        if self.min_p > 0.0:
            scores = ops.select(scores >= top + math.log(self.min_p), scores, ops.full_like(scores, MASKED))
        return scores

    def _search(self, weights, uniform):
        """Find the first index whose cumulative weight exceeds uniform * total.

        It searches among blocks first, then inside one. Returns the index in this rank's part of the vocabulary,
        int32[B], and float32[B], 1 if it is in that part.
        """
        rows, blocks = weights.shape[0], weights.shape[1] // self.block
        weights = weights.reshape((rows, blocks, self.block))
        sums = weights.sum(-1)
        if self.size > 1:
            sums = self.stack_ranks(sums).transpose((1, 0, 2)).reshape((rows, -1))
        across = self.cumulative(sums, -1)
        target = uniform.reshape((rows, 1)) * across[:, blocks * self.size - 1 :]
        block = (across <= target).astype("int32").sum(-1, keepdims=True)
        before = ops.select(block > 0, ops.gather_d(across, 1, ops.maximum(block - 1, 0)), ops.zeros_like(target))
        block, own = self._own((block * self.block).reshape((rows,)))
        index = ops.tile((block // self.block).reshape((rows, 1, 1)), (1, 1, self.block))
        inside = self.cumulative(ops.gather_d(weights, 1, index).reshape((rows, self.block)), -1)
        # The block's own sum may differ from the difference of sums in the last bit: stay strictly below its end.
        rest = ops.minimum(target - before, inside[:, self.block - 1 :] * (1.0 - 2.0**-22))
        return (block + (inside <= rest).astype("int32").sum(-1)).astype("int32"), own

    def _draw(self, weights, uniform):
        """Draw token int32[B] and log-prob float32[B] under weights [B, V] with any sum."""
        token, own = self._search(weights, uniform)
        weight = ops.gather_d(weights, 1, token.reshape((-1, 1))).reshape((-1,))
        total = weights.sum(-1)
        if self.size > 1:  # token ids are exact in float32, which has 24 bits for them
            numbers = self.reduce(ops.stack(((token + self.first).astype("float32") * own, weight * own, total)))
            token, weight, total = numbers[0].astype("int32"), numbers[1], numbers[2]
        return token, -log_from_one(total / weight)

    def _most_probable(self, scores):
        token = ops.argmax(scores, -1).astype("int32")
        if self.size == 1:
            return token
        best = ops.stack((self.row_max(scores, -1).reshape((-1,)), (token + self.first).astype("float32")))
        every = self.stack_ranks(best)  # [size, 2, B]
        rank = ops.argmax(every[:, 0], 0).astype("int32").reshape((1, -1))
        return ops.gather_d(every[:, 1], 0, rank).reshape((-1,)).astype("int32")

    def _log_prob(self, scores, token):
        top = self._largest(scores)
        local, own = self._own(token)
        below = scores - expand(top, scores.shape)
        picked = ops.gather_d(below, 1, local.reshape((-1, 1))).reshape((-1,)) * own
        numbers = self.reduce(ops.stack((picked, ops.exp(below).sum(-1))))
        return numbers[0] - log_from_one(numbers[1])

    def construct(self, logits, uniform, ban_stop, seen):
        """Draw one token for each slot.

        ban_stop: float32[B], 1 while a slot may not stop. seen: float32[B, V] (or [1, 1]), 1 at tokens that the slot
        already contains.
        """
        raw = logits * self.inverse
        scores = raw
        if self.penalty != 1.0:
            seen = seen[:, self.first : self.end]
            punished = ops.select(logits > 0, raw / self.penalty, raw * self.penalty)
            scores = ops.select(seen > 0, punished, raw)
        if self.bans_stop:
            ban = expand(ban_stop.reshape((-1, 1)), scores.shape)
            scores = scores + ban * expand(self.stop_mask, scores.shape)
        if self.greedy:
            token = self._most_probable(scores)
            policy = self._log_prob(raw, token)
            return token, ops.zeros_like(policy), policy
        if self.filters:
            scores = self._keep(scores)
        token, behaviour = self._draw(ops.exp(scores - expand(self._largest(scores), scores.shape)), uniform)
        if self.plain:
            return token, behaviour, behaviour
        return token, behaviour, self._log_prob(raw, token)
