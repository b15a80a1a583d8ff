"""Rows of weights in decode steps: how they are packed, and their products with columns, against NumPy in float64."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest
from bfloat16_numbers import rounded
from int8_numbers import int8
from mindspore import Tensor

from mindrlhf.backend.native import build, packing
from mindrlhf.backend.native.operators import open_operators

KINDS = ("float32", "bfloat16", "int8")


def dequantised(x: np.ndarray, kind: str) -> np.ndarray:
    kinds = {"int8": int8, "bfloat16": rounded, "float32": np.copy}
    return kinds[kind](x.astype(np.float64))


def packed(kind: str, weight: np.ndarray) -> np.ndarray:
    if kind == "float32":
        return weight
    out = np.empty((len(weight), packing.row_words(kind, weight.shape[1])), np.int32)
    packing.pack(kind, weight, out)
    return out


def product(kind: str, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return open_operators("float32", kind).decode_logits(Tensor(x), Tensor(packed(kind, weight))).asnumpy()


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
    operator = open_operators("bfloat16").decode_logits
    assert operator(Tensor(x), Tensor(weight)).asnumpy().tobytes() == product("bfloat16", x, weight).tobytes()


def test_an_array_to_pack_is_dense(fused):
    with pytest.raises(ValueError, match=r"shape \[4, 32\] is not dense"):
        packing.pack("int8", random(4, 64)[:, ::2], np.empty((4, 17), np.int32))


PRODUCTS = """#include "{folder}/slots.h"
#include "{folder}/weight_rows.h"
template <typename Number> void product_of(const int32_t *w, long rows, long in, const float *x, float *y) {{
  std::vector<Word> words(WordsOf<Number>::column(in) * 32);
  column_words<Number>(x, in, 32, words.data());
  const auto *columns = std::is_same_v<Number, float> ? reinterpret_cast<const Word *>(x) : words.data();
  multiply<Number>(w, rows, in, columns, 32, false, y);
}}
extern "C" {{
#define KIND(name, Number) \\
  void name(const int32_t *w, long rows, long in, const float *x, float *y) {{ product_of<Number>(w, rows, in, x, y); }}
KIND(float32, float)
KIND(bfloat16, BFloat16)
KIND(int8, Int8)
void attended(const float *keys, const float *values, long rows, long d, const float *q, float *y) {{
  std::vector<float> weights(2 * rows);
  for (int j = 0; j < 2; ++j) score(q + j * d, keys, 0, rows, d, weights.data() + j * rows);
  std::fill(y, y + 2 * d, 0.0f);
  mix(weights.data(), rows, values, 0, rows, d, 2, y);
}}
}}
"""
# The others that the package may be built without are built with `--slow`: each takes the compiler for 3 s.
FEW_WITHOUT = ((), ("avx512f",), ("avx",))
WITHOUT = ((), ("avx512vnni", "avxvnni", "avx512bf16"), ("avx512f",), ("avx2",), ("avx",))


@pytest.fixture(scope="module")
def builds(fused, tmp_path_factory, request):
    """The same source for registers of 64, 32 and 16 bytes, where the processor has them."""
    wanted = WITHOUT if request.config.getoption("--slow") else FEW_WITHOUT
    folder, built = tmp_path_factory.mktemp("products"), []
    source = folder / "products.cpp"
    source.write_text(PRODUCTS.format(folder=build.FOLDER))
    known = set(Path("/proc/cpuinfo").read_text().replace("_", "").split())
    # Without instructions that the processor lacks anyway, the build is the one before.
    for without in [names for names in wanted if not names or known.intersection(names)]:
        path, options = folder / f"{len(built)}.so", [f"-mno-{name}" for name in without]
        command = ["g++", *build.FLAGS, *build.NATIVE, "-shared", *options, "-w", str(source), "-o", str(path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized command-line option" in done.stderr:
            pytest.skip("this processor is no x86")
        assert done.returncode == 0, done.stderr
        built.append(ctypes.CDLL(str(path)))
    return built


def called(function, *arguments, size: tuple[int, int]) -> np.ndarray:
    y = np.empty(size, np.float32)
    given = [
        ctypes.c_void_p(one.ctypes.data) if isinstance(one, np.ndarray) else ctypes.c_long(one) for one in arguments
    ]
    function(*given, ctypes.c_void_p(y.ctypes.data))
    return y


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_the_same_with_fewer_of_the_processor_s_instructions(builds, kind):
    """To the last bit for int8: sums of whole numbers are exact. Without AVX there is no FMA for their scales."""
    columns, weight = random(200, 32), random(50, 200, seed=1)
    words, expected = packed(kind, weight), product(kind, np.ascontiguousarray(columns.T), weight).T
    found = [called(getattr(one, kind), words, 50, 200, columns, size=(50, 32)) for one in builds]
    np.testing.assert_array_equal(found[0], expected)
    for other in found[1:]:
        np.testing.assert_allclose(other, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    if kind == "int8":
        for other in found[1:-1]:
            np.testing.assert_array_equal(other, expected)


@pytest.mark.parametrize("d", [24, 64, 128])
def test_attention_of_a_decode_step_is_the_same_with_smaller_registers(builds, d):
    keys, values, q = random(70, d), random(70, d, seed=1), random(2, d, seed=2)
    expected = (q.astype(np.float64) @ keys.T) @ values
    for one in builds:
        found = called(one.attended, keys, values, 70, d, q, size=(2, d))
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
