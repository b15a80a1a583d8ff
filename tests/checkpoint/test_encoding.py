"""Rounding to bfloat16 and float16 and back, against formulas of other kinds."""

import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindrlhf.checkpoint import stored_tensor
from mindrlhf.checkpoint.stored_tensor import decode, encode
from mindrlhf.errors import UserError


def exact(bits: int) -> Fraction:
    """The value of finite non-negative bfloat16 bits by the format's definition: 8 exponent bits, 7 fraction bits.

    The bits of infinity give 2**128, the place where the next number would stand, as rounding asks.
    """
    exponent, fraction = bits >> 7, bits & 0x7F
    if exponent == 0:
        return Fraction(fraction, 128) * Fraction(2) ** -126
    return (1 + Fraction(fraction, 128)) * Fraction(2) ** (exponent - 127)


def nearest_bfloat16(number: float) -> int:
    """Bits of the nearest bfloat16, ties to the even one, by bisection over exact fractions."""
    magnitude = abs(Fraction(number))
    low, high = 0, 0x7F80
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exact(middle) <= magnitude else (low, middle)
    below, above = magnitude - exact(low), exact(high) - magnitude
    chosen = low if below < above or (below == above and low % 2 == 0) else high
    return chosen | (0x8000 if np.signbit(number) else 0)


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_rounds_to_nearest_even(bits):
    number = np.array([bits], np.uint32).view(np.float32)
    encoded = encode(number, "bfloat16", "w")
    if np.isnan(number[0]):
        assert np.isnan(decode(encoded, "bfloat16")[0])
    elif np.isinf(number[0]):
        assert encoded[0] == bits >> 16
    else:
        assert encoded[0] == nearest_bfloat16(float(number[0]))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # half-way, even below
        (0x3F818000, 0x3F82),  # half-way, even above
        (0x3F808001, 0x3F81),  # just above half-way
        (0x7F7FFFFF, 0x7F80),  # the largest float32 rounds to infinity
        (0x80000000, 0x8000),  # minus zero
        (0x00008001, 0x0001),  # a subnormal
        (0x7F800001, 0x7FC0),  # a NaN whose upper bits alone would be infinity
        (0xFFFFFFFF, 0xFFFF),  # a NaN that the rounding addition would carry over to zero
    ],
)
def test_bfloat16_corner_cases(bits, expected):
    assert encode(np.array([bits], np.uint32).view(np.float32), "bfloat16", "w")[0] == expected


def test_every_bfloat16_survives_the_way_through_float32():
    bits = np.arange(2**16, dtype=np.uint16)
    signalling = ((bits & 0x7F80) == 0x7F80) & ((bits & 0x7F) != 0)
    back = encode(decode(bits, "bfloat16"), "bfloat16", "w")
    np.testing.assert_array_equal(back, bits)
    assert np.isnan(decode(bits[signalling], "bfloat16")).all()


def test_every_finite_float16_survives_the_way_through_float32():
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[(bits & 0x7C00) != 0x7C00]
    halves = bits.view(np.float16)
    np.testing.assert_array_equal(encode(decode(halves, "float16"), "float16", "w").view(np.uint16), bits)
    by_struct = [struct.unpack("<e", struct.pack("<H", int(b)))[0] for b in bits[::97]]
    np.testing.assert_array_equal(decode(halves[::97], "float16"), np.float32(by_struct))


def test_blocks_change_nothing(monkeypatch):
    numbers = np.random.default_rng(0).normal(size=(7, 13)).astype(np.float32)
    whole = encode(numbers, "bfloat16", "w")
    monkeypatch.setattr(stored_tensor, "_BLOCK", 5)
    np.testing.assert_array_equal(encode(numbers, "bfloat16", "w"), whole)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_views_of_any_memory_layout_are_stored_in_order(dtype):
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (numbers.T, numbers[:, ::2], numbers[::-1]):
        stored = encode(view, dtype, "w")
        assert stored.flags.c_contiguous
        np.testing.assert_array_equal(decode(stored, dtype), view)


def test_too_large_for_float16_is_refused_with_the_tensor_named():
    with pytest.raises(UserError, match=r"wq.*100000.*float16"):
        encode(np.array([1.0, -1e5, np.inf], np.float32), "float16", "wq")
    assert encode(np.array([np.inf, 65504.0], np.float32), "float16", "wq")[0] == np.inf
