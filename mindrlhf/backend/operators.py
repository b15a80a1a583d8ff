"""The list of all operators that graphs are built from, with their composed forms.

A composed form is built from MindSpore's basic operators, runs on every device and has gradients. On CPU there is no
RmsNorm, Swiglu or RotaryPositionEmbedding, and no product of bfloat16 matrices. Attention scores and softmax are
float32.

Symbols: T tokens, B slots, N prompts, G samples of each, P prefix positions, R completion positions, S positions of a
cache, K key-value heads (on this rank), Q query heads per key-value head, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore
from mindspore import ops

from mindrlhf.backend import composed_optimizer
from mindrlhf.backend.comm.broadcast import expand
from mindrlhf.backend.composed_attention import causal_mask, completion_attention, key_mask, prefix_attention


def dtype_named(name: str) -> Any:
    """Return MindSpore's dtype of a name.

    A graph that casts to `"bfloat16"`, by its name, does not compile.
    """
    return getattr(mindspore, name)


class ModelOperators(Protocol):
    """Operators that stand for larger parts of a model or a collective.

    Their composed forms are the model's own code (`models.halves`, `models.decoder`, `models.head`) and
    `comm.graph_collectives`. A device without `fused` has none of them. All arrays are float32.
    """

    fused: bool = False

    def half(self, name: str, recompute: bool) -> Any:
        """Return a half of a layer as a Cell with a gradient, or None.

        It is None for a half that has no operator. name: of `models.layer.HALVES`. "attention" and "feed_forward" map
        x [T, hidden] to x + wo(attention(norm(x))) or x + w2(silu(w1(norm(x))) * w3(norm(x))), where padding gives 0.
        "image_attention" is the attention half of a vision tower: windows in place of prompts, some of which attend to
        each other in both directions (`HalfNumbers`), wq as [3 * width, hidden], and biases of all maps.
        "experts" maps a normed x [T, hidden], chosen int32[T, k] (the number of experts for none) and shares [T, k] to
        the sum of share * w2(silu(w1(x)) * w3(x)), with matrices [experts, ...].
        recompute: the backward pass keeps only x and computes the half again.
        """

    def decode_attention_half(self, x, weights, positions, numbers, key_cache, value_cache):
        """Run the attention half for one new position of each slot.

        It maps x [B, hidden] -> [B, hidden]. Keys and values are written to the caches. weights: those that the model
        has; positions: tables of cos and sin [positions, D], places in the cache int32[B], and rows of the tables
        int32[B]; numbers: pairs of name and value; caches: [B, K, S, D], or int32 with two bfloat16 numbers in each
        (`packs_cache`).
        """

    def decode_feed_forward_half(self, x, weights, numbers):
        """Run the feed-forward half for one new position of each slot.

        It maps x [B, hidden] -> [B, hidden].
        """

    def decode_experts_half(self, x, weights, numbers, kept):
        """Run the feed-forward half with experts for one new position of each slot.

        It maps x [B, hidden] -> [B, hidden]. kept: places in the cache int32[B], and the cache of the routing int32[B,
        layers, S, chosen], to which the experts are written if they are recorded.
        """

    def decode_logits(self, x, head):
        """Multiply x [B, hidden] by a head [V, hidden] to [B, V].

        The head may be packed.
        """

    def decode_tokens(self, slots, uniform, rules, stop_ids, table, angles, norm, head, kept, layers, given, numbers):
        """Draw up to n tokens of each slot.

        The tokens are the same that `models.decoder.Decoder` and `rollout.sampling.Sampler` draw one by one; a slot
        that has drawn a stop token draws no more.

        slots: int32[B] each: the last token, its place in the cache, its position in the sequence (of its rotary
            angle), the number of tokens still to come (0: an empty slot), the number of next tokens that must not be a
            stop token, the slot that holds the prompt, and the prompt's positions there; int32[3]: the number of active
            slots at which no further token begins, a slot's first position after the longest prompt, and the most
            steps; int32[B, n]: context tokens, which are taken as they are and never end a slot, -1 where a token is
            drawn; and int32[B, h]: texts to search for drafts of the next tokens (see `rollout.drafts`), -1 for none. A
            step draws one token of a slot, plus its draft's.
        uniform: [B, n]; rules: float32[r, B], the inverse temperature (0: greedy) first; stop_ids: int32[s], -1 for
            none; table: embeddings [V, hidden].
        angles: tables of cos and sin [positions, D]; norm: the final norm's weight; head: [V, hidden].
        kept: the cache of the routing int32[B, layers with experts, S, chosen], if it is recorded.
        layers: one flat tuple of each layer's attention weights, caches and feed-forward weights.
        given: for each half the bits of its weights. numbers: pairs of name and value.

        Returns tokens int32[B, n] (-1 for none), behaviour and policy log-probs [B, n] (0 without a draw), and
        int32[3]: steps, draft tokens, and accepted draft tokens. Drafts change no token and no log-prob.
        """

    def token_log_probs(self, hidden, head, targets, used, inverse_temperature):
        """Compute log-probs of targets, and entropies.

        hidden: [T, H]; head: [V, H]; targets: int32[T]; used: int32[T], 0 for tokens that may be skipped;
        inverse_temperature: [1]. Returns log-probs, entropies and logs of the partition sums [T], and logits [T, V].
        """

    def token_log_probs_gradient(self, hidden, head, *others):
        """Compute the gradient of hidden, and add that of head to its buffer.

        hidden: [T, H]; others: the other inputs and outputs of `token_log_probs`, gradients of log-probs and entropies
        [T], and the buffer [V, H] (any array without one). The logits are overwritten.
        """

    def shared_sum(self, group: Sequence[int]) -> Any:
        """Return a Cell that sums over ranks that share memory, forward and backward."""


class Operators(ModelOperators, Protocol):
    """All operators; a device overrides those that it computes in another way.

    activations: dtype of the arrays between operators. weights: dtype of the weights in decode steps. packs_cache:
    decode steps store keys and values as bfloat16, two in each int32.
    """

    activations: str = "float32"
    weights: str = "float32"
    packs_cache: bool = False

    @property
    def composed(self) -> "Operators":
        """All operators without `ModelOperators`, each with a gradient."""
        return self

    @staticmethod
    def linear(x, weight):
        """Multiply x [T, in] by weight [out, in] to [T, out], in x's dtype."""
        return ops.MatMul(transpose_b=True)(x, weight.astype(x.dtype))

    @staticmethod
    def linear_bias(x, weight, bias):
        """Multiply x [T, in] by weight [out, in] and add bias [out]."""
        y = ops.MatMul(transpose_b=True)(x, weight.astype(x.dtype))
        return y + expand(bias.astype(y.dtype), y.shape)

    @staticmethod
    def rms_norm(x, weight, eps):
        """Compute x * weight / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019, eq. 4)."""
        scale = ops.rsqrt(ops.ReduceMean(True)(ops.square(x), -1) + eps)
        return x * expand(scale, x.shape) * expand(weight, x.shape)

    @staticmethod
    def rotary(x, cos, sin):
        """Rotate the pairs (i, i + d/2) by position (Su et al. 2021).

        x: [1, T, heads, d]; cos, sin: [1, T, 1, d], the angles of the d/2 frequencies written twice.
        """
        half = x.shape[-1] // 2
        rotated = ops.concat((-x[..., half:], x[..., :half]), -1)
        return x * expand(cos, x.shape) + rotated * expand(sin, x.shape)

    @staticmethod
    def swiglu(gate, up):
        """Compute silu(gate) * up (Shazeer 2020, eq. 5)."""
        return ops.silu(gate) * up

    @staticmethod
    def group_view(prefix_lengths, lengths, split, key_heads, query_heads):
        """Build the masks of `group_attention`, once for all layers.

        prefix_lengths: int32[N]; lengths: int32[N*G], completion lengths, for operators that skip padding; split: (N,
        P, G, R), with G = 0 for prompts only.
        """
        _, p, g, r = split
        queries = query_heads // key_heads
        if g == 0:
            return (causal_mask(p, queries),)
        return causal_mask(p, queries), causal_mask(r, queries), key_mask(prefix_lengths, p)

    @staticmethod
    def group_attention(query, key, value, view, split, scale):
        """Attend causally within prompts, and from completions to their shared prompt and themselves.

        query: [T, K * Q, D] for T = N*P + N*G*R tokens, prompts first, or for the completion tokens only; key, value:
        [T, K, D]; view: from `group_view`. Returns [query rows, K * Q * D]. Within prompts, right padding needs no
        extra mask: a real position never looks ahead, and nothing reads the padded positions.
        """
        n, p, g, r = split
        heads, d = key.shape[1:]
        far = n * p
        far_shape = (n, p, heads, d)
        near_shape = (n, g, r, heads, d)
        far_q_shape = (n, p, heads, -1, d)
        near_q_shape = (n, g, r, heads, -1, d)
        far_k, far_v = key[:far].reshape(far_shape), value[:far].reshape(far_shape)
        if g == 0:
            return prefix_attention(query.reshape(far_q_shape), far_k, far_v, view[0], scale).reshape((far, -1))
        rows = n * g * r
        near_q = query[query.shape[0] - rows :].reshape(near_q_shape)
        near_k, near_v = key[far:].reshape(near_shape), value[far:].reshape(near_shape)
        near = completion_attention(near_q, near_k, near_v, far_k, far_v, view[1], view[2], scale).reshape((rows, -1))
        if query.shape[0] == rows:
            return near
        out = prefix_attention(query[:far].reshape(far_q_shape), far_k, far_v, view[0], scale)
        return ops.concat((out.reshape((far, -1)), near))

    @staticmethod
    def image_attention(query, key, value, mask, scale):
        """Attend in both directions within runs of patches.

        query, key, value: [runs, patches, heads, D]; mask: float32[runs, patches], added to the scores of the patches
        as keys: 0, or `MASKED`. Returns [runs * patches, heads * D], of patches whose own is masked anything finite.
        """
        runs, span = mask.shape
        query = query.astype("float32").transpose((0, 2, 1, 3)) * scale
        key = key.astype("float32").transpose((0, 2, 1, 3))
        scores = ops.BatchMatMul(transpose_b=True)(query, key)
        weights = ops.softmax(scores + expand(mask.reshape((runs, 1, 1, span)), scores.shape), -1)
        out = ops.BatchMatMul()(weights, value.astype("float32").transpose((0, 2, 1, 3)))
        return out.transpose((0, 2, 1, 3)).reshape((runs * span, -1))

    @staticmethod
    def decode_view(positions, heads, size):
        """Build cache positions and mask of `decode_attention`, once for all layers.

        positions: int32[B], of the new tokens; heads, size: K and S of the caches.
        """
        b = positions.shape[0]
        slots = ops.arange(0, b * heads).astype("int32").reshape((b * heads, 1))
        places = ops.tile(positions.reshape((b, 1)), (1, heads)).reshape((b * heads, 1))
        return ops.concat((slots // heads, slots % heads, places), 1), key_mask(positions + 1, size)

    @staticmethod
    def decode_attention(query, key, value, key_cache, value_cache, view, scale):
        """Write one new position of each slot into the caches, and attend.

        query: [B, K * Q, D]; key, value: [B, K, D]; key_cache, value_cache: Parameters [B, K, S, D]; view: from
        `decode_view`. Returns [B, K * Q * D].
        """
        places, mask = view
        b, s = mask.shape
        heads = key.shape[1]
        d = query.shape[-1]
        put = ops.ScatterNdUpdate()
        key_cache = put(key_cache, places, key.reshape((-1, d)))
        value_cache = put(value_cache, places, value.reshape((-1, d)))
        query = query.reshape((b, heads, -1, d))
        scores = ops.BatchMatMul(transpose_b=True)(query * scale, key_cache).astype("float32")
        weights = ops.softmax(scores + expand(mask.reshape((b, 1, 1, s)), scores.shape), -1)
        return ops.BatchMatMul()(weights.astype(value_cache.dtype), value_cache).reshape((b, -1))

    @staticmethod
    def admit(slots, rows, limit, prefilled, caches):
        """Copy row `rows[i]` of prefilled caches to slot `slots[i]`, int32[A] each.

        prefilled: [N, K, P, D] each; caches: Parameters [B, K, S, D]. The first `limit` positions are copied at least;
        operators may leave or zero the content after them. Returns a tensor that depends on the copies.
        """
        put = ops.ScatterUpdate()
        done = slots
        for i in range(len(caches)):
            taken = ops.gather(prefilled[i], rows, 0)
            a, k, p, d = taken.shape
            rest = caches[i].shape[2] - p
            padded = ops.concat((taken, ops.zeros((a, k, rest, d), taken.dtype)), 2) if rest > 0 else taken
            done = ops.depend(done, put(caches[i], slots, padded))
        return done

    @staticmethod
    def squared_norm(gradients):
        """Sum the squares of all gradients to a float32 scalar."""
        parts = ()
        for gradient in gradients:
            parts += (ops.square(gradient).sum(),)
        return ops.stack(parts).sum()

    @staticmethod
    def adamw(parameters, gradients, first, second, decays, rows, numbers):
        """Update all parameters and moments in place; zero the gradients.

        decays: for each parameter, True if weight decay applies. rows: (first, end) of the rows of each gradient that
        belong to the parameter. numbers: six float32 scalars: rate, beta1, beta2, epsilon, decay, and the factor of the
        gradients. The update is w -= rate * (m / (sqrt(v) + epsilon) + decay * w), without bias correction of moments.
        """
        rate, beta1, beta2, eps, decay, scale = numbers
        done = rate
        for i in range(len(parameters)):
            gradient = gradients[i]
            start, end = rows[i]
            own = gradient if end - start == gradient.shape[0] else gradient[start:end]
            own_decay = decay if decays[i] else decay * 0.0
            update = ops.AdamWeightDecay()
            step = update(parameters[i], first[i], second[i], rate, beta1, beta2, eps, own_decay, own * scale)
            done = ops.depend(done, step)
            # g - g instead of zeros, which would become constants of the graph and take the model's size in memory
            # again. The gradients are finite here.
            done = ops.depend(done, ops.assign_sub(gradient, ops.depend(gradient, step)))
        return done

    @staticmethod
    def rounded_adamw(parameters, gradients, first, second, scales, decays, rows, numbers, draws, columns):
        """Update parameters as `adamw` does, with moments in a form of `mindrlhf.optimizer_state`.

        first, second: bfloat16, or int8 and uint8 codes. scales: of the codes, all of the first moments and then all of
        the second; none for bfloat16. draws: random float32 in [0, 1): of each row of all parameters, [rows], and of
        columns, for both moments, [2, columns]. A number between two of the form gets the larger magnitude if the
        fraction of the sum of its row's and its column's draws is below its share of the way. columns: the first
        column of each parameter.
        """
        given = (parameters, gradients, first, second, scales, decays, rows, numbers, draws, columns)
        return composed_optimizer.rounded_adamw(*given)


@dataclass(frozen=True)
class ComposedOperators(Operators):
    """The composed forms of all operators."""

    activations: str = "float32"
    weights: str = "float32"


COMPOSED = ComposedOperators()
