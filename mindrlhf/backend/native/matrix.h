// Matrix products that threads share: linear maps and their gradients.

#pragma once

#include <dlfcn.h>
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "factors.h"
#include "lanes.h"
#include "team.h"

namespace {

template <typename Number>
using Gemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const Number *, int64_t, const Number *, int64_t,
                     float, float *, int64_t);

// Finds a function of the oneDNN library that comes with MindSpore; null if it is missing.
template <typename Function>
Function find_in_library(const char *name) {
  void *library = dlopen("libdnnl.so.3", RTLD_NOW);
  return library ? reinterpret_cast<Function>(dlsym(library, name)) : nullptr;
}

// The matrix product of oneDNN. Each call uses one thread; the surrounding loops share the work.
template <typename Number>
const Gemm<Number> library_gemm =
    find_in_library<Gemm<Number>>(std::is_same_v<Number, float> ? "dnnl_sgemm" : "dnnl_gemm_bf16bf16f32");

// Computes c [m, n] = alpha * op(a) op(b) + beta * c.
template <typename Number>
void gemm(char a_op, char b_op, int64_t m, int64_t n, int64_t k, float alpha, const Number *a, int64_t lda,
          const Number *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) {
    for (int64_t i = 0; i < m && beta == 0; ++i) std::fill(c + i * ldc, c + i * ldc + n, 0.0f);
    return;
  }
  library_gemm<Number>(a_op, b_op, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

// The last bits of a row depend on the number of rows that oneDNN gets. Measured: they do not with AVX2, which processes 6
// rows at a time, if a product has a multiple of 12 rows up to 144; nor with AVX-512 from 16 rows on, up to 192.
const bool kWide = kRegister == kLanes;
const int64_t kEvenRows = kWide ? 1 : 12, kLeastRows = kWide ? 16 : 12, kMostRows = kWide ? 192 : 144;

// Computes c [m, n] = alpha * a op(b) + beta * c. The bits of a row do not depend on its place among the rows.
template <typename Number>
void gemm_rows(char b_op, int64_t m, int64_t n, int64_t k, float alpha, const Number *a, int64_t lda, const Number *b,
               int64_t ldb, float beta, float *c, int64_t ldc) {
  auto product = [&](int64_t rows, const Number *x, int64_t ldx, float *y, int64_t ldy) {
    gemm('N', b_op, rows, n, k, alpha, x, ldx, b, ldb, beta, y, ldy);
  };
  while (m >= kLeastRows) {
    const int64_t rows = std::min(m, kMostRows) / kEvenRows * kEvenRows;
    product(rows, a, lda, c, ldc);
    m -= rows, a += rows * lda, c += rows * ldc;
  }
  if (m <= 0) return;
  thread_local std::vector<Number> inputs;
  thread_local std::vector<float> outputs;
  inputs.assign(kLeastRows * k, Number{});
  outputs.assign(kLeastRows * n, 0.0f);
  for (int64_t i = 0; i < m; ++i) {
    std::copy_n(a + i * lda, k, inputs.data() + i * k);
    std::copy_n(c + i * ldc, n, outputs.data() + i * n);
  }
  product(kLeastRows, inputs.data(), k, outputs.data(), n);
  for (int64_t i = 0; i < m; ++i) std::copy_n(outputs.data() + i * n, n, c + i * ldc);
}

// Rounds the rows of a piece up to a multiple of `kEvenRows`, so that oneDNN has no remaining rows.
int64_t even_rows(int64_t size) { return (size + kEvenRows - 1) / kEvenRows * kEvenRows; }

const int64_t kRows = 192;     // rows per piece of work
const int64_t kColumns = 128;  // columns per piece, if work is split by columns
template <typename Number>
const int64_t kGradientColumns = std::is_same_v<Number, float> ? 128 : 384;  // most columns per piece of a weight's gradient
const int64_t kLayerRows = 96;  // most rows per piece that goes through several products
template <typename Number>  // most rows per piece of a pair: packing a weight takes a larger part of a faster product's time
const int64_t kPairRows = std::is_same_v<Number, float> ? 144 : 320;
const int64_t kLeastPair = 32;  // fewest rows of a pair: with fewer, `gemm_rows` adds rows

// Returns the size that cuts `rows` into an even number of about equal pieces, so that two at a time end together.
template <typename Number>
int64_t paired_piece(int64_t rows) {
  if (rows < kLeastPair) return std::max<int64_t>(rows, 1);
  const int64_t most = kPairRows<Number>;
  const int64_t pieces = 2 * ((rows + 2 * most - 1) / (2 * most));
  return even_rows((rows + pieces - 1) / pieces);
}

// Like `paired_piece`, for work that adds up one sum per piece: another number of pieces gives different last bits.
template <typename Number>
int64_t summed_piece(int64_t rows) {
  if (std::is_same_v<Number, float>) return even_rows(even_piece(rows, kLayerRows));
  return paired_piece<Number>(rows);
}

// Adds bias [columns], unless it is null, to each row of y; rows are `stride` apart.
void add_bias(const float *bias, float *y, int64_t rows, int64_t columns, int64_t stride) {
  if (!bias) return;
  for (int64_t i = 0; i < rows; ++i, y += stride) {
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) y[c] += bias[c];
  }
}

// Computes the product y [rows, out] of x [rows, in] and a weight [out, in].
template <typename Number>
void linear_rows(const Number *x, const Number *w, float *y, int64_t rows, int64_t in, int64_t out) {
  if (rows >= 2 * kRows) {
    parallel_pieces(rows, kRows, [&](int64_t i, int64_t m) {
      gemm_rows('T', m, out, in, 1, x + i * in, in, w, in, 0, y + i * out, out);
    });
  } else {
    parallel_pieces(out, kColumns,
                    [&](int64_t j, int64_t n) { gemm_rows('T', rows, n, in, 1, x, in, w + j * in, in, 0, y + j, out); });
  }
}

// The gradient of a weight [out, in], computed from dy [rows, out] and x [rows, in]; null target: it is skipped.
template <typename Number>
struct WeightGradient {
  int64_t rows;
  const Number *dy, *x;
  float *target;
  int64_t out, in, apart = out;  // apart: the stride of dy's rows
};

// Adds the gradients to their targets. Cuts the longer side of each into pieces; threads share the pieces of all gradients.
template <typename Number>
void weight_gradients(const std::vector<WeightGradient<Number>> &list) {
  struct Part {
    const WeightGradient<Number> *gradient;
    int64_t first, size;
  };
  std::vector<Part> parts;
  for (const WeightGradient<Number> &one : list) {
    const int64_t all = std::max(one.out, one.in), most = kGradientColumns<Number>;
    const int64_t step = std::is_same_v<Number, float> ? most : even_piece(all, most);
    for (int64_t j = 0; one.target && j < all; j += step) parts.push_back({&one, j, std::min(step, all - j)});
  }
  parallel_pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const WeightGradient<Number> &g = *parts[part].gradient;
    const int64_t j = parts[part].first, n = parts[part].size;
    if (g.out < g.in) {
      gemm('T', 'N', g.out, n, g.rows, 1, g.dy, g.apart, g.x + j, g.in, 1, g.target + j, g.in);
      return;
    }
    const Number *dy = g.dy + j;
    int64_t stride = g.apart;
    if (g.apart * sizeof(Number) % 4096 == 0) {  // such columns use the same cache lines: half the speed
      stride = n + 16;
      auto copy = reinterpret_cast<Number *>(scratch(g.rows * stride));
      for (int64_t i = 0; i < g.rows; ++i) std::copy(dy + i * g.apart, dy + i * g.apart + n, copy + i * stride);
      dy = copy;
    }
    gemm('T', 'N', n, g.in, g.rows, 1, dy, stride, g.x, g.in, 1, g.target + j * g.in, g.in);
  });
}

// Adds the rows of x [rows, columns] to sums [columns], unless it is null.
template <typename Number>
void add_rows(const Number *x, int64_t rows, int64_t columns, float *sums) {
  if (!sums) return;
  parallel_pieces(columns, kColumns, [&](int64_t j, int64_t n) {
    for (int64_t i = 0; i < rows; ++i) {
      const Number *row = x + i * columns;
#pragma omp simd
      for (int64_t c = j; c < j + n; ++c) sums[c] += number(row[c]);
    }
  });
}

}  // namespace
