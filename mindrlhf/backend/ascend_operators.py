"""Operators on Ascend, not run on a device.

They are fused where the documented API has them. `tests/helpers/ascend_contracts.py` holds each call against its
documentation, on CPU.
"""

from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, ops
from mindspore.ops import constexpr

from mindrlhf.backend.operators import Operators

MOST_SEQUENCES = 1024  # of one call with layout TND
MASK_SIZE = 2048  # of the one mask that stands for every causal one
RIGHT_DOWN = 3  # sparse_mode: causal, with the last query at the last key
MOST_RUNS = 2048  # of one call with layout BNSD
WHOLE_MASK = 1  # sparse_mode: the mask as it is


@dataclass(frozen=True)
class AscendOperators(Operators):
    """Norm, rotation and gated product of MindSpore, and composed forms of the others."""

    activations: str = "float32"
    weights: str = "float32"

    @staticmethod
    def rms_norm(x, weight, eps):
        return ops.rms_norm(x, weight.astype(x.dtype), eps)[0]

    @staticmethod
    def rotary(x, cos, sin):
        """Rotate halves by position: mode 0 with layout BSND and 1S1D."""
        return ops.rotary_position_embedding(x, cos.astype(x.dtype), sin.astype(x.dtype), 0)

    @staticmethod
    def swiglu(gate, up):
        return ops.swiglu(ops.concat((gate, up), -1), -1)


class AscendAttention(AscendOperators):
    """Operators with MindSpore's flash attention, for float16 and bfloat16.

    Scores never exist as a matrix. In updates, each completion is one sequence whose keys are its prompt's real ones
    and its own, without padding between them: keys and values of a prompt are gathered once for each completion. More
    than `MOST_SEQUENCES` prompts and completions in a micro-batch are short ones, and take the composed form.
    """

    @staticmethod
    def group_view(prefix_lengths, lengths, split, key_heads, query_heads):
        """Build what `group_attention` reads.

        Returns the rows of keys int32[N*G*(P+R) + 1], ends of the sequences' queries and keys int64, of all sequences
        and of completions alone, and the mask.
        """
        n, p, g, r = split
        if n + n * g + 1 > MOST_SEQUENCES:
            return Operators.group_view(prefix_lengths, lengths, split, key_heads, query_heads)
        mask = causal_mask(MASK_SIZE)
        if g == 0:
            ends = ends_of_equal(n, p)
            return ends, ends, mask
        count = n * g
        prompts = ops.tile(prefix_lengths.reshape((n, 1)), (1, g)).reshape((count, 1))
        sizes = prompts + r
        ends = ops.cumsum(sizes, 0)
        rows = _gathered_rows(prompts, sizes, ends, split)
        last = count * (p + r) + 1  # behind the sequences lies one more, of all rows that are left
        own_keys = ops.concat((ends.reshape((-1,)), ops.full((1,), last).astype("int32"))).astype("int64")
        own_queries = ends_of_equal(count, r, 1)
        keys = ops.concat((ends_of_equal(n, p), own_keys + n * p))
        queries = ops.concat((ends_of_equal(n, p), own_queries + n * p))
        return rows, queries, keys, own_queries, own_keys, mask

    @staticmethod
    def group_attention(query, key, value, view, split, scale):
        """Attend causally within each sequence, by layout TND."""
        n, p, g, r = split
        if n + n * g + 1 > MOST_SEQUENCES:
            return Operators.group_attention(query, key, value, view, split, scale)
        if g == 0:
            return _flash(query, key, value, view[0], view[1], view[2], scale).reshape((n * p, -1))
        rows = view[0]
        own_key, own_value = ops.gather(key, rows, 0), ops.gather(value, rows, 0)
        padded = ops.concat((query, query[:1]))  # the last sequence's only query, whose result nothing reads
        if query.shape[0] == n * g * r:
            out = _flash(padded, own_key, own_value, view[3], view[4], view[5], scale)
        else:
            keys = ops.concat((key[: n * p], own_key))
            values = ops.concat((value[: n * p], own_value))
            out = _flash(padded, keys, values, view[1], view[2], view[5], scale)
        return out[: query.shape[0]].reshape((query.shape[0], -1))

    @staticmethod
    def image_attention(query, key, value, mask, scale):
        """Attend within runs of patches, by layout BNSD.

        More than `MOST_RUNS` runs are windows, and composed.
        """
        runs, span, heads, _ = query.shape
        if runs > MOST_RUNS:
            return Operators.image_attention(query, key, value, mask, scale)
        # A run of nothing but padding sees itself: the operator has no result for a query that sees no key.
        hidden = mask < mask.amax(-1, True)
        hidden = ops.tile(hidden.reshape((runs, 1, 1, span)), (1, 1, span, 1))
        out = ops.flash_attention_score(
            query.astype(value.dtype).transpose((0, 2, 1, 3)),
            key.astype(value.dtype).transpose((0, 2, 1, 3)),
            value.transpose((0, 2, 1, 3)),
            heads,
            attn_mask=hidden,
            scalar_value=scale,
            input_layout="BNSD",
            sparse_mode=WHOLE_MASK,
        )
        return out.transpose((0, 2, 1, 3)).reshape((runs * span, -1))

    @staticmethod
    def decode_view(positions, heads, size):
        """Build cache positions, and the number of keys of each slot, int64[B]."""
        b = positions.shape[0]
        slots = ops.arange(0, b * heads).astype("int32").reshape((b * heads, 1))
        places = ops.tile(positions.reshape((b, 1)), (1, heads)).reshape((b * heads, 1))
        return ops.concat((slots // heads, slots % heads, places), 1), (positions + 1).astype("int64")

    @staticmethod
    def decode_attention(query, key, value, key_cache, value_cache, view, scale):
        """Write one new position of each slot into the caches, and attend."""
        places, counts = view
        b, heads, d = query.shape
        put = ops.ScatterNdUpdate()
        key_cache = put(key_cache, places, key.reshape((-1, d)))
        value_cache = put(value_cache, places, value.reshape((-1, d)))
        out = ops.incre_flash_attention(
            query.reshape((b, heads, 1, d)),
            (key_cache,),
            (value_cache,),
            actual_seq_lengths=counts,
            num_heads=heads,
            input_layout="BNSD",
            scale_value=scale,
            num_key_value_heads=key.shape[1],
        )
        return out.reshape((b, -1))


def _flash(query, key, value, query_ends, key_ends, mask, scale):
    """Attend in sequences with these ends: [T1, K * Q, D]."""
    return ops.flash_attention_score(
        query,
        key,
        value,
        query.shape[1],
        attn_mask=mask,
        actual_seq_qlen=query_ends,
        actual_seq_kvlen=key_ends,
        scalar_value=scale,
        next_tokens=0,
        input_layout="TND",
        sparse_mode=RIGHT_DOWN,
    )


def _gathered_rows(prompts, sizes, ends, split):
    """List the rows of keys of all completions, without padding.

    Returns int32[N*G*(P+R) + 1], 0 behind the last.

    prompts, sizes, ends: int32[N*G, 1], tokens of each completion's prompt, its keys, and their cumulated number.
    """
    n, p, g, r = split
    count = n * g
    wide = (count, p + r)
    last = count * (p + r)
    places = ops.tile(ops.arange(0, p + r).astype("int32").reshape((1, p + r)), (count, 1))
    numbers = ops.arange(0, count).astype("int32").reshape((count, 1))
    before = ops.tile(prompts, (1, p + r))
    far = ops.tile(numbers // g * p, (1, p + r)) + places
    near = ops.tile(numbers * r + n * p, (1, p + r)) + places - before
    used = places < ops.tile(sizes, (1, p + r))
    rows = ops.select(used, ops.select(places < before, far, near), ops.zeros(wide, far.dtype))
    targets = ops.select(used, ops.tile(ends - sizes, (1, p + r)) + places, ops.full(wide, last).astype("int32"))
    empty = ops.zeros((last + 1,), rows.dtype)
    return ops.tensor_scatter_elements(empty, targets.reshape((-1,)), rows.reshape((-1,)))


@constexpr
def causal_mask(size: int) -> Tensor:
    """Make the mask bool[size, size], True where a query must not look."""
    return Tensor(np.triu(np.ones((size, size), bool), 1))


@constexpr
def ends_of_equal(count: int, size: int, further: int = 0) -> Tensor:
    """Compute the ends of `count` sequences of equal size: int64.

    further: rows of one more sequence; 0 is none.
    """
    ends = [size * (i + 1) for i in range(count)]
    return Tensor(np.array([*ends, ends[-1] + further] if further else ends, np.int64))
