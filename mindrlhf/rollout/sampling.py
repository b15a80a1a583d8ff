"""Sampling of one token for each slot, inside the decode graph.

A slot has a rule of its own. Order of the filters: repetition penalty on the logits, temperature, top-k, top-p over
top-k's tokens, min-p. The draw inverts the cumulative distribution at one uniform number. Tensor-parallel ranks draw
the same token.
"""

import math
from collections.abc import Sequence

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
# Rows of `rule_of`.
INVERSE, TOP_K, TOP_P, LOG_MIN_P, PENALTY, PLAIN = range(6)


def block_size(vocabulary: int, ranks: int = 1) -> int:
    """Find the block size of the two-level search in a rank's vocabulary.

    It is the divisor of the rank's part nearest to the whole vocabulary's square root: the search reads V/b + b numbers
    of a row.
    """
    part = vocabulary // ranks
    divisors = [b for b in range(1, part + 1) if part % b == 0]
    return min(divisors, key=lambda b: abs(math.log(b * b / vocabulary)))


def draws_in_operator(settings: SamplingSettings, vocabulary: int, ranks: int, bans: bool = False) -> bool:
    """Test that the operator for several tokens can draw with these settings.

    bans: some tokens are never drawn. The operator bans them as it bans stop tokens, so that it has no stop tokens
    then; and a greedy token's log-prob would count them.
    """
    filters = 0 < settings.top_k < vocabulary or settings.top_p < 1.0 or settings.min_p > 0.0
    ends = bans and (settings.min_new_tokens > 0 or settings.temperature == 0)
    return ranks == 1 and not filters and settings.repetition_penalty == 1.0 and not ends


def rule_of(settings: SamplingSettings, vocabulary: int) -> np.ndarray:
    """Lay out the sampling rule of one slot as float32[6].

    These are the inverse temperature (0: greedy), top-k (0: off), top-p, the logarithm of min-p, the repetition
    penalty, and 1 if tokens are drawn from all of the model's distribution.
    """
    rule = np.zeros(6, np.float32)
    rule[INVERSE] = 1.0 / settings.temperature if settings.temperature else 0.0
    rule[TOP_K] = settings.top_k if settings.top_k < vocabulary else 0
    rule[TOP_P] = settings.top_p
    rule[LOG_MIN_P] = math.log(settings.min_p) if settings.min_p else -np.inf
    rule[PENALTY] = settings.repetition_penalty
    filters = rule[TOP_K] or settings.top_p < 1.0 or settings.min_p
    rule[PLAIN] = not filters and settings.repetition_penalty == 1.0 and not settings.min_new_tokens
    return rule


class Sampler(nn.Cell):
    """Sampler of tokens from logits float32[B, V] and uniform float32[B].

    The outputs are token int32[B], behaviour log-prob and policy log-prob, float32[B].
    settings: the graph computes what any of these needs; a slot's tokens depend on its own rule alone.
    shards: the ranks that share the vocabulary, V / size logits each; every rank returns the same.
    never_drawn: tokens whose logits are masked already (`models.allowed_tokens`); the operator for several tokens has
    logits without a mask. by_token: never for that operator.
    The behaviour log-prob is under the distribution drawn from; the policy log-prob has only the temperature applied.
    Temperature 0 takes the largest logit; its behaviour log-prob is 0 and its policy log-prob is at temperature 1.
    """

    def __init__(
        self,
        settings: Sequence[SamplingSettings],
        vocabulary: int,
        stop_ids: tuple[int, ...],
        shards: TensorParallel | None = None,
        never_drawn: tuple[int, ...] = (),
        by_token: bool = False,
    ):
        super().__init__(auto_prefix=False)
        shards = shards or TensorParallel()
        self.size = shards.size
        self.stack_ranks = shards.stack
        self.reduce = shards.reduce
        self.first, self.end = shards.share(vocabulary)
        rules = np.stack([rule_of(one, vocabulary) for one in settings], 1)
        drawing = rules[:, rules[INVERSE] > 0]
        self.draws = drawing.shape[1] > 0
        self.greedy = drawing.shape[1] < len(settings)
        self.top_k = int(drawing[TOP_K].max(initial=0))
        self.top_p = bool((drawing[TOP_P] < 1).any())
        self.min_p = bool((drawing[LOG_MIN_P] > -np.inf).any())
        self.penalises = bool((rules[PENALTY] != 1).any())
        self.bans_stop = any(one.min_new_tokens for one in settings)
        self.filters = bool(self.top_k or self.top_p or self.min_p)
        self.all_plain = bool(drawing[PLAIN].all())
        self.some_plain = bool(drawing[PLAIN].any())
        # A number that all slots share is a constant: a column would be repeated along the vocabulary.
        shared = rules[:, 0] if np.unique(rules[[INVERSE, PENALTY]], axis=1).shape[1] == 1 else None
        self.shares = shared is not None
        self.inverse = float(shared[INVERSE]) or 1.0 if self.shares else 1.0
        self.penalty = float(shared[PENALTY]) if self.shares else 1.0
        stop = np.zeros((1, vocabulary), np.float32)
        stop[0, [i for i in stop_ids if i < vocabulary]] = MASKED
        self.stop_mask = Tensor(stop[:, self.first : self.end].copy())
        self.block = block_size(vocabulary, shards.size)
        self.bans = bool(never_drawn)
        simple = all(draws_in_operator(one, vocabulary, shards.size, self.bans) for one in settings)
        self.simple = simple and not by_token
        filters = (self.top_k, self.top_p, self.min_p, self.penalises, self.bans_stop)
        kinds = (self.draws, self.greedy, self.all_plain, self.some_plain, self.shares, self.inverse, self.penalty)
        self.rule = (*kinds, *filters, self.simple, tuple(stop_ids))  # tells samplers apart
        self.stop_ids = Tensor(np.array(never_drawn or stop_ids or (-1,), np.int32))  # of the operator
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

    def _kth_largest(self, scores, top_k):
        """Find each row's k-th largest score.

        The map is [B, V], float32[B, 1] -> [B, 1], with -inf where k is 0.
        """
        values = ops.topk(scores, min(self.top_k, self.end - self.first))[0]
        if self.size > 1:
            values = self.stack_ranks(values).transpose((1, 0, 2)).reshape((scores.shape[0], -1))
            values = ops.topk(values, self.top_k)[0]
        last = ops.gather_d(values, 1, ops.maximum(top_k.astype("int32") - 1, 0))
        return ops.select(top_k > 0, last, ops.full_like(last, -np.inf))

    def _keep(self, scores, rules):
        """Set scores that top-k, top-p or min-p exclude to MASKED."""
        top = self._largest(scores)
        if self.top_k:
            least = self._kth_largest(scores, self._column(rules, TOP_K))
            scores = ops.select(scores >= least, scores, ops.full_like(scores, MASKED))
        if self.top_p:
            share = self._column(rules, TOP_P)
            weights = ops.exp(scores - expand(top, scores.shape))
            target = self._total(weights) * share
            low, high = top - TOP_P_RANGE, top  # tokens above `low` have the mass; tokens above `high` may not
            for _ in range(TOP_P_HALVINGS):
                middle = (low + high) * 0.5
                enough = self._total(ops.select(scores >= middle, weights, ops.zeros_like(weights))) >= target
                low, high = ops.select(enough, middle, low), ops.select(enough, high, middle)
            low = ops.select(share < 1.0, low, ops.full_like(low, -np.inf))
            scores = ops.select(scores >= low, scores, ops.full_like(scores, MASKED))
        if self.min_p:
            least = top + self._column(rules, LOG_MIN_P)
            scores = ops.select(scores >= least, scores, ops.full_like(scores, MASKED))
        return scores

    def _search(self, weights, uniform):
        """Find the first index whose cumulative weight exceeds uniform * total.

        It searches among blocks first, then inside one. Returns the index in this rank's part of the vocabulary,
        int32[B], and float32[B], 1 if it is in that part.
        """
        rows = weights.shape[0]
        blocks = weights.shape[1] // self.block
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
            token = numbers[0].astype("int32")
            weight = numbers[1]
            total = numbers[2]
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

    def _column(self, rules, row):
        """Take one number of every slot's rule: float32[6, B] -> [B, 1]."""
        return rules[row].reshape((-1, 1))

    def construct(self, logits, uniform, ban_stop, rules, seen):
        """Draw one token for each slot.

        ban_stop: float32[B], 1 while a slot may not stop. rules: float32[6, B], each slot's `rule_of`. seen: float32[B,
        V] (or [1, 1]), 1 at tokens that the slot already contains.
        """
        inverse = self.inverse
        penalty = self.penalty
        takes_largest = self._column(rules, INVERSE) == 0
        if not self.shares:
            own = self._column(rules, INVERSE)
            factors = ops.select(takes_largest, ops.ones_like(own), own)
            inverse = expand(factors, logits.shape)
        raw = logits * inverse
        scores = raw
        if self.penalises:
            if not self.shares:
                penalty = expand(self._column(rules, PENALTY), logits.shape)
            seen = seen[:, self.first : self.end]
            punished = ops.select(logits > 0, raw / penalty, raw * penalty)
            scores = ops.select(seen > 0, punished, raw)
        if self.bans_stop:
            ban = expand(ban_stop.reshape((-1, 1)), scores.shape)
            scores = scores + ban * expand(self.stop_mask, scores.shape)
        if not self.draws:
            token = self._most_probable(scores)
            policy = self._log_prob(raw, token)
            return token, ops.zeros_like(policy), policy
        kept = self._keep(scores, rules) if self.filters else scores
        token, behaviour = self._draw(ops.exp(kept - expand(self._largest(kept), kept.shape)), uniform)
        if self.greedy:
            takes_largest = takes_largest.reshape((-1,))
            token = ops.select(takes_largest, self._most_probable(scores), token)
            behaviour = ops.select(takes_largest, ops.zeros_like(behaviour), behaviour)
        elif self.all_plain:
            return token, behaviour, behaviour
        policy = self._log_prob(raw, token)
        if self.some_plain:
            plain = ops.logical_and(rules[PLAIN] > 0, rules[INVERSE] > 0)
            policy = ops.select(plain, behaviour, policy)
        return token, behaviour, policy
