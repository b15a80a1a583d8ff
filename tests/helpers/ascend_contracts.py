"""Stand-ins for the operators that MindSpore has on Ascend only: their documented contracts, computed on the CPU.

`mindrlhf.backend.ascend_operators` gets this module as its `ops` (`contracts`). Each function has the documented names
of arguments, checks dtypes, layouts, alignment and limits while the graph is compiled, and computes in float32.
The operators of `PLAIN`, which the documentation lists for the CPU too, are MindSpore's own; there is no other one.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from unittest import mock

import numpy as np
from mindspore import Tensor
from mindspore import ops as mindspore_ops
from mindspore.ops import constexpr

from mindrlhf.backend import ascend_operators
from mindrlhf.backend.ascend import ASCEND
from mindrlhf.backend.composed_attention import MASKED
from mindrlhf.backend.cpu import CPU
from mindrlhf.backend.device import Device
from mindrlhf.backend.devices import DEVICES

HALVES, FLOATS = ("Float16", "BFloat16"), ("Float16", "BFloat16", "Float32")
LARGEST = 2147483647
# As its documentation names them, and nothing here takes.
UNUSED = ("real_shift", "drop_mask", "padding_mask", "prefix")


class Broken(Exception):
    """A call that the documentation does not allow."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def platforms(name: str) -> str:
    """The platforms that MindSpore's documentation lists for an operator."""
    words = getattr(mindspore_ops, name).__doc__ or ""
    if alias := re.search(r"Alias for :func:`mindspore\.ops\.(\w+)", words):
        return platforms(alias[1])
    found = re.search(r"Supported Platforms:\s*\n\s*(``.*)", words)
    return found[1] if found else ""


# Operators in use that MindSpore has on the CPU too. Graphs look names up in a module's own entries.
_PLAIN = "ScatterNdUpdate arange concat cumsum full gather select tensor_scatter_elements tile zeros"
PLAIN = tuple(_PLAIN.split())
globals().update({name: getattr(mindspore_ops, name) for name in PLAIN})


def rms_norm(x, gamma, epsilon=1e-6):
    """Documented for equal dtypes of both inputs; returns the reciprocal deviation too."""
    epsilon = checked_rms_norm(str(x.dtype), x.shape, str(gamma.dtype), gamma.shape, epsilon)
    wide = x.astype("float32")
    scale = mindspore_ops.rsqrt(mindspore_ops.square(wide).mean(-1, keep_dims=True) + epsilon)
    return (wide * scale * gamma.astype("float32")).astype(x.dtype), scale


@constexpr
def checked_rms_norm(dtype, shape, gamma_dtype, gamma_shape, epsilon):
    require(dtype in FLOATS, f"rms_norm: x is {dtype}, not one of {FLOATS}")
    require(gamma_dtype == dtype, f"rms_norm: gamma is {gamma_dtype}, and x {dtype}")
    require(isinstance(epsilon, float) and 0 < epsilon <= 1, f"rms_norm: epsilon is {epsilon!r}")
    require(shape[len(shape) - len(gamma_shape) :] == gamma_shape, f"rms_norm: x {shape}, gamma {gamma_shape}")
    return epsilon


def swiglu(input, dim=-1):
    dim = checked_swiglu(str(input.dtype), input.shape, dim)
    gate, up = mindspore_ops.chunk(input.astype("float32"), 2, dim)
    return (mindspore_ops.silu(gate) * up).astype(input.dtype)


@constexpr
def checked_swiglu(dtype, shape, dim):
    require(dtype in FLOATS, f"swiglu: input is {dtype}, not one of {FLOATS}")
    require(isinstance(dim, int) and -len(shape) <= dim < len(shape), f"swiglu: dim is {dim!r}")
    require(shape[dim] % 2 == 0, f"swiglu: the size {shape[dim]} of dim {dim} is odd")
    return dim


def rotary_position_embedding(x, cos, sin, mode=0):
    """Mode 0 with x as BSND and angles as 1S1D, the only layouts in use here."""
    half = checked_rotary(str(x.dtype), x.shape, str(cos.dtype), cos.shape, str(sin.dtype), sin.shape, mode)
    wide = x.astype("float32")
    turned = mindspore_ops.concat((-wide[..., half:], wide[..., :half]), -1)
    return (wide * cos.astype("float32") + turned * sin.astype("float32")).astype(x.dtype)


@constexpr
def checked_rotary(dtype, shape, cos_dtype, cos_shape, sin_dtype, sin_shape, mode):
    require(dtype in FLOATS, f"rotary: x is {dtype}, not one of {FLOATS}")
    require(cos_dtype == sin_dtype == dtype, f"rotary: cos {cos_dtype}, sin {sin_dtype}, x {dtype}")
    require(mode == 0, f"rotary: mode is {mode!r}, and halves are rotated by mode 0")
    require(len(shape) == 4, f"rotary: x has {len(shape)} dimensions, not 4")
    b, s, n, d = shape
    require(cos_shape == sin_shape == (1, s, 1, d), f"rotary: x is BSND {shape}, cos {cos_shape}, not 1S1D")
    require(d % 2 == 0 and d < 896, f"rotary: D is {d}, and has to be even and below 896")
    require(b < 1000 and n < 1000, f"rotary: B is {b} and N {n}, and both have to be below 1000")
    return d // 2


def flash_attention_score(
    query,
    key,
    value,
    head_num,
    real_shift=None,
    drop_mask=None,
    padding_mask=None,
    attn_mask=None,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    keep_prob=1.0,
    scalar_value=1.0,
    pre_tokens=LARGEST,
    next_tokens=LARGEST,
    inner_precise=0,
    input_layout="BSH",
    sparse_mode=0,
):
    """Layout TND with the compressed causal mask, and BNSD with a whole one, the only forms in use here."""
    options = (head_num, keep_prob, scalar_value, pre_tokens, next_tokens, inner_precise, input_layout, sparse_mode)
    absent = (real_shift is None, drop_mask is None, padding_mask is None, prefix is None)
    given = (attn_mask is not None, actual_seq_qlen is not None, actual_seq_kvlen is not None)
    dtypes = (str(query.dtype), str(key.dtype), str(value.dtype))
    shapes = (query.shape, key.shape, value.shape)
    if input_layout == "BNSD":
        mask = (str(attn_mask.dtype), attn_mask.shape) if given[0] else None
        scale = checked_whole(dtypes, shapes, options, absent, given[1:], mask)
        return whole_attention(query, key, value, attn_mask.astype("float32"), scale)
    scale = checked_options(dtypes, shapes, options, absent, given)
    kinds = (str(attn_mask.dtype), str(actual_seq_qlen.dtype), str(actual_seq_kvlen.dtype))
    sizes = (attn_mask.shape, actual_seq_qlen.shape, actual_seq_kvlen.shape)
    heads = checked_sequences(kinds, sizes, head_num, key.shape[1])
    query_ends = actual_seq_qlen.astype("int32")
    key_ends = actual_seq_kvlen.astype("int32")
    allowed = visible(query.shape[0], key.shape[0], query_ends, key_ends)
    wide_key = mindspore_ops.repeat_interleave(key.astype("float32"), heads, 1).transpose((1, 0, 2))
    wide_value = mindspore_ops.repeat_interleave(value.astype("float32"), heads, 1).transpose((1, 0, 2))
    wide_query = query.astype("float32").transpose((1, 0, 2)) * scale
    scores = mindspore_ops.BatchMatMul(transpose_b=True)(wide_query, wide_key)
    scores = scores + (1.0 - allowed) * MASKED
    out = mindspore_ops.BatchMatMul()(mindspore_ops.softmax(scores, -1), wide_value)
    # The kernel has undefined results where the lengths break its rules.
    sound = mindspore_ops.stop_gradient(sound_lengths(query.shape[0], key.shape[0], query_ends, key_ends))
    return (out.transpose((1, 0, 2)) / sound).astype(query.dtype)


def whole_attention(query, key, value, hidden, scale):
    """Attend where the mask is 0; a query that sees nothing has no result."""
    scores = mindspore_ops.BatchMatMul(transpose_b=True)(query.astype("float32") * scale, key.astype("float32"))
    out = mindspore_ops.BatchMatMul()(mindspore_ops.softmax(scores + hidden * MASKED, -1), value.astype("float32"))
    sound = mindspore_ops.stop_gradient((hidden.amin(-1) < 0.5).astype("float32"))
    return (out / sound.reshape((*sound.shape, 1))).astype(query.dtype)


@constexpr
def checked_whole(dtypes, shapes, options, absent, lengths, mask):
    head_num, keep_prob, scale, pre_tokens, next_tokens, _, _, sparse_mode = options
    require(set(dtypes) <= set(HALVES) and len(set(dtypes)) == 1, f"flash_attention_score: dtypes {dtypes}")
    require(all(absent), f"flash_attention_score: one of {UNUSED} is given")
    require(not any(lengths), "flash_attention_score: BNSD takes no actual_seq_qlen and actual_seq_kvlen")
    require(all(len(shape) == 4 for shape in shapes), f"flash_attention_score: shapes {shapes} are not BNSD")
    (b, heads, s1, d), key, value = shapes
    require(key == value, f"flash_attention_score: key {key}, value {value}")
    require(b == key[0] and b <= 2048, f"flash_attention_score: B is {b} and {key[0]}, and at most 2k")
    require(d == key[3] and d % 16 == 0 and d <= 512, f"flash_attention_score: D is {d} and {key[3]}")
    require(head_num == heads and 1 <= heads <= 256, f"flash_attention_score: head_num {head_num}, N1 {heads}")
    require(heads == key[1], f"flash_attention_score: N2 {key[1]} other than N1 {heads} has no contract here")
    require(s1 <= 1 << 19 and key[2] <= 1 << 19, f"flash_attention_score: S1 {s1}, S2 {key[2]}")
    require(mask is not None, "flash_attention_score: BNSD without attn_mask has no contract here")
    require(mask[0] in ("Bool", "UInt8"), f"flash_attention_score: attn_mask is {mask[0]}")
    require(mask[1] == (b, 1, s1, key[2]), f"flash_attention_score: attn_mask is {mask[1]}, not (B, 1, S1, S2)")
    require(sparse_mode == 1, f"flash_attention_score: sparse_mode {sparse_mode} with BNSD has no contract here")
    require(pre_tokens == next_tokens == LARGEST, "flash_attention_score: tokens have no effect with sparse_mode 1")
    require(isinstance(scale, float) and keep_prob == 1.0, "flash_attention_score: scale and keep_prob")
    return scale


def visible(queries, keys, query_ends, key_ends):
    """float32[T1, T2]: 1 where a query sees a key: in its sequence, which ends with the last query at the last key."""
    rows = mindspore_ops.arange(0, queries).astype("int32").reshape((-1, 1))
    columns = mindspore_ops.arange(0, keys).astype("int32").reshape((-1, 1))
    last = query_ends.shape[0] - 1  # for lengths that do not cover all rows, which `sound_lengths` spoils
    row_of = mindspore_ops.clamp((rows >= query_ends.reshape((1, -1))).astype("int32").sum(1), 0, last)
    column_of = mindspore_ops.clamp((columns >= key_ends.reshape((1, -1))).astype("int32").sum(1), 0, last)
    before_rows = mindspore_ops.gather(query_ends, row_of, 0).reshape((-1, 1)) - rows
    before_columns = mindspore_ops.gather(key_ends, column_of, 0).reshape((1, -1)) - columns.reshape((1, -1))
    same = (row_of.reshape((-1, 1)) == column_of.reshape((1, -1))).astype("float32")
    return same * (before_columns >= before_rows).astype("float32")


def sound_lengths(queries, keys, query_ends, key_ends):
    """1 where the cumulated lengths keep the rules for TND, else 0: a division by it then spoils the result."""
    zero = mindspore_ops.zeros((1,), query_ends.dtype)
    of_queries = query_ends - mindspore_ops.concat((zero, query_ends[:-1]))
    of_keys = key_ends - mindspore_ops.concat((zero, key_ends[:-1]))
    whole = (query_ends[-1] == queries).astype("float32") * (key_ends[-1] == keys).astype("float32")
    positive = (of_keys > 0).astype("float32").min() * (of_queries > 0).astype("float32").min()
    return whole * positive * (of_queries <= of_keys).astype("float32").min()


@constexpr
def checked_options(dtypes, shapes, options, absent, given):
    head_num, keep_prob, scale, pre_tokens, next_tokens, _, layout, sparse_mode = options
    require(set(dtypes) <= set(HALVES) and len(set(dtypes)) == 1, f"flash_attention_score: dtypes {dtypes}")
    require(layout == "TND", f"flash_attention_score: input_layout {layout!r} has no contract here")
    require(all(absent), f"flash_attention_score: one of {UNUSED} is given")
    require(all(given), "flash_attention_score: TND needs attn_mask, actual_seq_qlen and actual_seq_kvlen")
    require(all(len(shape) == 3 for shape in shapes), f"flash_attention_score: shapes {shapes} are not TND")
    (_, heads, d), key, value = shapes
    require(key == value, f"flash_attention_score: key {key}, value {value}")
    require(d == key[2] and d % 16 == 0 and d <= 512, f"flash_attention_score: D is {d} and {key[2]}")
    require(head_num == heads and 1 <= heads <= 256, f"flash_attention_score: head_num {head_num}, N1 {heads}")
    require(heads % key[1] == 0, f"flash_attention_score: N2 {key[1]} is no factor of N1 {heads}")
    require(sparse_mode in (2, 3), f"flash_attention_score: sparse_mode {sparse_mode} with TND")
    require(sparse_mode == 3, "flash_attention_score: sparse_mode 2 has no contract here")
    require(next_tokens == 0 and pre_tokens >= shapes[0][0], f"flash_attention_score: tokens {pre_tokens, next_tokens}")
    require(isinstance(scale, float) and isinstance(keep_prob, float), "flash_attention_score: scale and keep_prob")
    require(keep_prob == 1.0, f"flash_attention_score: keep_prob {keep_prob} without a drop_mask")
    return scale


@constexpr
def checked_sequences(kinds, sizes, head_num, key_heads):
    mask, *ends = kinds
    require(mask in ("Bool", "UInt8"), f"flash_attention_score: attn_mask is {mask}")
    require(sizes[0] == (2048, 2048), f"flash_attention_score: attn_mask is {sizes[0]}, not (2048, 2048)")
    require(ends == ["Int64", "Int64"], f"flash_attention_score: actual_seq_qlen and _kvlen are {ends}")
    require(sizes[1] == sizes[2] and len(sizes[1]) == 1, f"flash_attention_score: lists of {sizes[1:]}")
    require(sizes[1][0] <= 1024, f"flash_attention_score: {sizes[1][0]} sequences, and at most 1024 are allowed")
    return head_num // key_heads


def incre_flash_attention(
    query,
    key,
    value,
    attn_mask=None,
    actual_seq_lengths=None,
    pse_shift=None,
    dequant_scale1=None,
    quant_scale1=None,
    dequant_scale2=None,
    quant_scale2=None,
    quant_offset2=None,
    antiquant_scale=None,
    antiquant_offset=None,
    block_table=None,
    num_heads=1,
    input_layout="BSH",
    scale_value=1.0,
    num_key_value_heads=0,
    block_size=0,
    inner_precise=1,
    kv_padding_size=None,
):
    """Layout BNSD with lengths, the only form in use here."""
    options = (num_heads, input_layout, scale_value, num_key_value_heads, block_size)
    dtypes = (str(query.dtype), str(key[0].dtype), str(value[0].dtype), str(actual_seq_lengths.dtype))
    shapes = (query.shape, key[0].shape, value[0].shape, actual_seq_lengths.shape)
    scale = checked_increment(dtypes, shapes, options, len(key), len(value), attn_mask is None, block_table is None)
    b, heads, _, d = query.shape
    _, key_heads, size, _ = key[0].shape
    wide = query.astype("float32").reshape((b, key_heads, heads // key_heads, d)) * scale
    scores = mindspore_ops.BatchMatMul(transpose_b=True)(wide, key[0].astype("float32"))
    places = mindspore_ops.arange(0, size).astype("int32").reshape((1, 1, 1, size))
    hidden = places >= actual_seq_lengths.astype("int32").reshape((b, 1, 1, 1))
    scores = scores + hidden.astype("float32") * MASKED
    out = mindspore_ops.BatchMatMul()(mindspore_ops.softmax(scores, -1), value[0].astype("float32"))
    return out.reshape((b, heads, 1, d)).astype(query.dtype)


@constexpr
def checked_increment(dtypes, shapes, options, keys, values, no_mask, no_table):
    num_heads, layout, scale, key_heads, block_size = options
    query, key, value, counts = shapes
    require(keys == values == 1, "incre_flash_attention: key and value are lists of one tensor")
    require(dtypes[0] in HALVES and len(set(dtypes[:3])) == 1, f"incre_flash_attention: dtypes {dtypes}")
    require(layout == "BNSD", f"incre_flash_attention: input_layout {layout!r} has no contract here")
    require(len(query) == 4 and query[2] == 1, f"incre_flash_attention: query {query} is not (B, N, 1, D)")
    require(len(key) == 4 and key == value, f"incre_flash_attention: key {key}, value {value}")
    require(query[1] == num_heads, f"incre_flash_attention: num_heads {num_heads}, N {query[1]}")
    require(key[1] == (key_heads or num_heads), f"incre_flash_attention: num_key_value_heads {key_heads}, N {key[1]}")
    require(num_heads % key[1] == 0, f"incre_flash_attention: {num_heads} heads over {key[1]}")
    require((key[0], key[3]) == (query[0], query[3]), f"incre_flash_attention: key {key}, query {query}")
    require(dtypes[3] == "Int64" and counts == (query[0],), f"incre_flash_attention: lengths {dtypes[3]} {counts}")
    require(no_mask and no_table and block_size == 0, "incre_flash_attention: masks and blocks have no contract here")
    require(isinstance(scale, float), f"incre_flash_attention: scale_value is {scale!r}")
    return scale


CONTRACTS = ("rms_norm", "swiglu", "rotary_position_embedding", "flash_attention_score", "incre_flash_attention")


class ContractDevice(Device):
    """The CPU with Ascend's operators and dtypes."""

    def operators(self, dtype="float32", weights="train"):
        return ASCEND.operators(dtype, weights)

    def is_attached(self):
        return True


def contract_device(dtype: str) -> ContractDevice:
    """The CPU with Ascend's operators, whose products are of this dtype."""
    return ContractDevice(
        name=CPU.name,
        in_host_memory=True,
        swap="file",
        collectives=CPU.collectives,
        product_dtypes=(dtype,),
        activation_dtype=ASCEND.activation_dtype,
        ceiling_size=256,
        attention=ASCEND.attention,
        default_dtypes={role: {"compute_dtype": dtype} for role in ASCEND.default_dtypes},
    )


@contextlib.contextmanager
def contracts(dtype: str = "float16") -> Iterator[Device]:
    """Inside, the CPU computes with Ascend's operators; yields its record.

    dtype: bfloat16 for graphs that do not run, because the CPU has no products of bfloat16.
    """
    device = contract_device(dtype)
    with (
        mock.patch.object(ascend_operators, "ops", sys.modules[__name__]),
        mock.patch.dict(DEVICES, {CPU.name: device}),
    ):
        yield device


def on_cpu(*arrays: np.ndarray) -> list[Tensor]:
    """float16 tensors."""
    return [Tensor(np.asarray(array, np.float16)) for array in arrays]
