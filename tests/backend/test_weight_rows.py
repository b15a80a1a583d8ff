"""Rows of weights in decode steps: how they are packed, and their products with columns, against NumPy in float64."""

import ctypes
import subprocess

import numpy as np
import pytest
from mindspore import Tensor

from mindrlhf.backend import native
from mindrlhf.backend.native import packing
from mindrlhf.backend.native.operators import operators
from mindrlhf.checkpoint.stored_tensor import decode, encode

BLOCK = 64
KINDS = ("float32", "bfloat16", "int8")


def int8(x: np.ndarray) -> np.ndarray:
    """float64 of the nearest numbers with 127 steps on either side of zero, in blocks of 64 of a row."""
    padded = np.zeros((len(x), -(-x.shape[1] // BLOCK) * BLOCK))
    padded[:, : x.shape[1]] = x
    blocks = padded.reshape(len(x), -1, BLOCK)
    steps = np.abs(blocks).max(-1, keepdims=True) / 127
    return (np.rint(blocks / np.where(steps, steps, 1)) * steps).reshape(padded.shape)[:, : x.shape[1]]


def dequantised(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "int8":
        return int8(x.astype(np.float64))
    return decode(encode(x, kind, "x"), kind).astype(np.float64).reshape(x.shape)


def packed(kind: str, weight: np.ndarray) -> np.ndarray:
    if kind == "float32":
        return weight
    out = np.empty((len(weight), packing.row_words(kind, weight.shape[1])), np.int32)
    packing.pack(kind, weight, out)
    return out


def product(kind: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return operators("float32", kind).decode_logits(Tensor(x), Tensor(packed(kind, weight))).asnumpy()


def random(*shape: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, with a few large numbers, as activations have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(2 * rng.standard_normal((shape[0], 1)))
    return np.where(rng.random(shape) < 0.01, 20 * x, x).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 64, 8), (7, 77, 50), (20, 130, 71), (70, 896, 129), (33, 1, 3)]
)
def test_products_are_those_of_the_dequantised_numbers(fused, kind, rows, inputs, outputs):
    """Columns are rounded as weights are; sums are in float32."""
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    wide = dequantised(x, kind), dequantised(weight, kind)
    expected, size = wide[0] @ wide[1].T, np.abs(wide[0]) @ np.abs(wide[1]).T
    assert (np.abs(product(kind, x, weight) - expected) <= 2e-6 * size + 1e-30).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(fused, kind):
    x, weight = random(64, 300), random(70, 300, seed=1)
    every = product(kind, x, weight)
    for count in (1, 8, 16, 17, 33):
        assert product(kind, x[:count], weight).tobytes() == every[:count].tobytes()
    assert product(kind, x, weight[:13]).tobytes() == np.ascontiguousarray(every[:, :13]).tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_zero_and_what_is_not_finite_is_not_hidden(fused, kind):
    x, weight = random(3, 128), random(9, 128, seed=1)
    x[0], weight[4] = 0, 0
    found = product(kind, x, weight)
    assert not found[0].any()
    assert not found[:, 4].any()
    x[1, 70], weight[5, 3] = np.nan, np.inf
    found = product(kind, x, weight)
    assert not np.isfinite(found[1]).any()
    assert not np.isfinite(found[2, 5])
    assert np.isfinite(found[2, :5]).all()


def test_bfloat16_weights_may_also_be_packed_by_the_operator(fused):
    x, weight = random(20, 77), random(50, 77, seed=1)
    operator = operators("bfloat16").decode_logits
    assert operator(Tensor(x), Tensor(weight)).asnumpy().tobytes() == product("bfloat16", x, weight).tobytes()


def test_an_array_to_pack_is_dense(fused):
    with pytest.raises(ValueError, match=r"shape \[4, 32\] is not dense"):
        packing.pack("int8", random(4, 64)[:, ::2], np.empty((4, 17), np.int32))


PRODUCTS = """#include "{header}"
extern "C" void product(const int32_t *w, long rows, long in, const float *x, float *y) {{
  std::vector<Word> columns(WordsOf<Int8>::column(in) * 32);
  column_words<Int8>(x, in, 32, columns.data());
  multiply<Int8>(w, rows, in, columns.data(), 32, false, y);
}}
"""


def test_int8_products_have_the_same_bits_without_the_processor_s_instructions(fused, tmp_path):
    """Sums of whole numbers are exact."""
    source = tmp_path / "products.cpp"
    source.write_text(PRODUCTS.format(header=native.SOURCE.with_name("weight_rows.h")))
    columns, weight = random(200, 32), random(50, 200, seed=1)
    words, found = packed("int8", weight), []
    for options in ((), ("-mno-avx512vnni", "-mno-avxvnni", "-mno-avx512bf16"), ("-mno-avx512f",)):
        built = tmp_path / f"{len(found)}.so"
        command = ["g++", *native.FLAGS, *options, "-w", str(source), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized command-line option" in done.stderr:
            pytest.skip("this processor is no x86")
        assert done.returncode == 0, done.stderr
        y = np.empty((50, 32), np.float32)
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (words, columns, y)]
        ctypes.CDLL(str(built)).product(pointers[0], ctypes.c_long(50), ctypes.c_long(200), *pointers[1:])
        found.append(y.tobytes())
    assert found[0] == found[1] == found[2]
    expected = product("int8", np.ascontiguousarray(columns.T), weight).T
    assert np.ascontiguousarray(expected).tobytes() == found[0]
