"""Codes of the optimizer's moments: exact where they are exact, unbiased where they round, and never a zero below m."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mindrlhf.optimizer_state import (
    BLOCK,
    CODES,
    DTYPES,
    LEAST_SCALE,
    TOP,
    block_scales,
    decode,
    encode,
    form_of,
    moment_bytes,
    scales_shape,
)

MOMENTS = ("first", "second")
SMALLEST = {"first": 2.0**-17, "second": 2.0**-31}  # under a scale of 1


def drawn(*shape, seed=0):
    """Numbers of many sizes, of which some are zero."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-5, 3, shape)
    return (values * (rng.random(shape) > 0.05)).astype(np.float32)


def moments_of(values, moment):
    return values if moment == "first" else values * values


@pytest.mark.parametrize("moment", MOMENTS)
def test_codes_are_floats_of_three_bits_of_mantissa(moment):
    table = CODES[moment]
    assert len(table) == {"first": 128, "second": 256}[moment]
    assert (np.diff(table) > 0).all()
    assert table[-1] == TOP
    gaps = np.log2(np.diff(table.astype(np.float64)))
    assert (gaps == np.round(gaps)).all()
    assert (table[0] == 0) == (moment == "first")
    assert table[table > 0][0] == SMALLEST[moment]


@given(arrays(np.float32, 20, elements=st.floats(0, 2.0**120, width=32)))
def test_scales_are_the_smallest_powers_of_two_that_hold_a_block(largest):
    scales = block_scales(largest)
    assert ((scales == 0) == (largest == 0)).all()
    held = largest[largest > 0].astype(np.float64)
    own = scales[largest > 0].astype(np.float64)
    assert (np.log2(own) == np.round(np.log2(own))).all()
    assert (held <= TOP * own).all()
    assert ((held > TOP * own / 2) | (own == LEAST_SCALE)).all()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("shape", [(3, 5), (4, 128), (2, 3, 300), (1, 129)])
def test_a_moment_is_at_most_a_code_away(moment, shape):
    values = moments_of(drawn(*shape), moment)
    for uniform, share in ((0.5, 1 / 16), (np.random.default_rng(1).random(shape), 1 / 8)):
        codes, scales = encode(values, moment, uniform)
        assert (codes.dtype, codes.shape) == (DTYPES[moment], shape)
        assert scales.shape == scales_shape(shape)
        found = decode(codes, scales)
        least = np.repeat(scales, BLOCK, -1)[..., : shape[-1]] * SMALLEST[moment]
        assert (np.abs(found - values) <= np.maximum(share * np.abs(values), least)).all()
        assert (found * values >= 0).all()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("size", [1e-37, 1e-20, 1.0, 1e15])
def test_what_codes_hold_is_stored_again_without_loss(moment, size):
    values = (moments_of(drawn(6, 200), moment) * size).astype(np.float32)
    held = decode(*encode(values, moment, np.random.default_rng(2).random(values.shape)))
    for uniform in (0.0, 0.5, 1 - 2.0**-23):
        assert decode(*encode(held, moment, uniform)).tobytes() == held.tobytes()


@pytest.mark.parametrize("moment", MOMENTS)
def test_blocks_that_are_cut_elsewhere_hold_the_same_numbers(moment):
    """As long as their largest numbers are not too far apart."""
    rng = np.random.default_rng(3)
    sizes = rng.uniform(0.1, 1.0, (6, 300)) * 10.0 ** rng.integers(-2, 1, (6, 300)) * rng.choice([-1, 1], (6, 300))
    values = moments_of(sizes.astype(np.float32), moment)
    held = decode(*encode(values, moment))
    for start in (0, 50, 200):
        assert decode(*encode(held[:, start:], moment)).tobytes() == held[:, start:].tobytes()


@pytest.mark.parametrize("moment", MOMENTS)
def test_rounding_is_unbiased(moment):
    """The mean over many draws is the number, within five deviations of the mean."""
    values = np.abs(drawn(1, 40, seed=4)) + np.float32(1e-3)
    values[0, 0] = 300.0
    values = np.broadcast_to(values, (4000, 40))
    codes, scales = encode(values, moment, np.random.default_rng(5).random(values.shape))
    found = decode(codes, scales).astype(np.float64)
    deviation = np.maximum(found.std(0), 1e-12) / np.sqrt(len(found))
    assert (np.abs(found.mean(0) - values[0]) <= 5 * deviation).all()
    assert (found.std(0) > 0).sum() > 30


def test_a_second_moment_next_to_a_large_one_is_never_zero():
    values = np.full((1, BLOCK), 1e-25, np.float32)
    values[0, 3] = 1.0
    values[0, 4] = 0.0
    found = decode(*encode(values, "second", np.random.default_rng(6).random(values.shape)))
    assert (found > 0).all()
    assert (found >= values).sum() >= BLOCK - 1
    assert not decode(*encode(np.zeros((1, BLOCK), np.float32), "second")).any()


def test_vectors_keep_float32():
    assert [form_of("int8", shape) for shape in [(7,), (1, 7), (2, 3, 4)]] == ["float32", "int8", "int8"]
    assert [moment_bytes(state, (10, 256)) for state in ("float32", "bfloat16", "int8")] == [10240, 5120, 2560 + 80]
    assert moment_bytes("int8", (2, 3, 130)) == 2 * 3 * (130 + 8)
    assert moment_bytes("int8", (256,)) == moment_bytes("bfloat16", (256,)) == 1024
