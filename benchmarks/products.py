"""Rates of oneDNN's matrix products of float32 and of bfloat16 numbers, in the pieces that the fused operators cut.

OMP_NUM_THREADS=2 python benchmarks/products.py

A product y [m, n] of inner size k is one call on one thread; both threads of the table make their own at the same time.
Weights change from call to call, so that they come from memory as in a layer. Rates are GFLOP/s, the best of 3 tries.
The numbers are rounded beforehand.
"""

import argparse
import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindrlhf.backend import native
from mindrlhf.checkpoint.stored_tensor import encode

GEMM = {"float32": "dnnl_sgemm", "bfloat16": "dnnl_gemm_bf16bf16f32"}
BYTES, OPERATIONS, TRIES = 2**26, 1e10, 3  # of all weights, and of a try

# (what, transposed, m, n, k), of hidden 256, inner 704, vocabulary 2048; then of Qwen2.5-0.5B
SHAPES = [
    ("up", "NT", 144, 704, 256),
    ("down", "NT", 144, 256, 704),
    ("gradient of x", "NN", 96, 256, 192),
    ("gradient of a weight", "TN", 128, 256, 576),
    ("head", "NT", 144, 2048, 256),
    ("up", "NT", 144, 4864, 896),
    ("down", "NT", 144, 896, 4864),
    ("gradient of x", "NN", 96, 896, 192),
    ("gradient of a weight", "TN", 128, 896, 576),
    ("head", "NT", 144, 30000, 896),
    ("decoding, 32 slots", "NN", 64, 32, 896),
    ("decoding, 16 slots", "NN", 64, 16, 896),
]


def rate(library: ctypes.CDLL, dtype: str, transposed: str, m: int, n: int, k: int) -> float:
    """GFLOP/s of one thread."""
    rng, count = np.random.default_rng(0), max(1, BYTES // (4 * max(m, n) * k))
    numbers = lambda size: rng.normal(size=size).astype(np.float32)  # noqa: E731
    stored = (lambda x: x) if dtype == "float32" else (lambda x: np.ascontiguousarray(encode(x, dtype, "x")))
    decoding = transposed == "NN" and n <= 32  # the weight is the first factor
    one, many = (n * k, m * k) if decoding else (m * k, n * k)
    x, weights = stored(numbers(one)), [stored(numbers(many)) for _ in range(count)]
    y, gemm = np.empty(m * n, np.float32), getattr(library, GEMM[dtype])
    size, number, array = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
    gemm.argtypes = (ctypes.c_char,) * 2 + (size,) * 3 + (number,) + (array, size) * 2 + (number, array, size)
    first, second = (part.encode() for part in transposed)
    strides = k if first == b"N" else m, n if second == b"N" else k

    def run(i: int) -> None:
        pair = (weights[i % count], x) if decoding else (x, weights[i % count])
        a, b = (part.ctypes.data for part in pair)
        gemm(first, second, m, n, k, 1.0, a, strides[0], b, strides[1], 0.0, y.ctypes.data, n)

    calls, best = max(2, int(OPERATIONS / (2 * m * n * k))), float("inf")
    run(0)
    for _ in range(TRIES):
        start = time.perf_counter()
        for i in range(calls):
            run(i)
        best = min(best, time.perf_counter() - start)
    return 2e-9 * m * n * k * calls / best


def rates(threads: int, *product) -> float:
    """GFLOP/s of all threads."""
    found: list[float] = []
    workers = [threading.Thread(target=lambda: found.append(rate(*product))) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(found)


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    if not native.library().bfloat16:
        print("products: this processor has no fast bfloat16 products", file=sys.stderr)
        return 2
    library, threads = ctypes.CDLL("libdnnl.so.3"), int(os.environ.get("OMP_NUM_THREADS", 1))  # it is loaded
    print(f"GFLOP/s of {threads} threads\n")
    print("| product | m x n x k | float32 | bfloat16 | ratio |\n| --- | --- | --- | --- | --- |")
    for what, transposed, *sizes in SHAPES:
        single, half = (rates(threads, library, dtype, transposed, *sizes) for dtype in GEMM)
        print(
            f"| {what} | {' x '.join(map(str, sizes))} | {single:.0f} | {half:.0f} | {half / single:.1f} |", flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
