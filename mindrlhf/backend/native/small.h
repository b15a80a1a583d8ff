// The operators outside of the halves: a linear map, and a norm with its gradient.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "factors.h"
#include "lanes.h"
#include "matrix.h"
#include "names.h"
#include "team.h"

namespace {

// Computes a linear map: x [T, in], weight [out, in] -> y [T, out].
template <typename Number>
int linear_of(void **params, int *, int64_t **shapes) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t rows = shapes[0][0], in = shapes[0][1], out = shapes[1][0];
  const FactorMemory<Number> of_x(rows * in), of_weight(out * in);
  const Number *x = all_factors(p[0], rows * in, of_x.data()), *weight = all_factors(p[1], out * in, of_weight.data());
  linear_rows(x, weight, p[2], rows, in, out);
  return 0;
}

}  // namespace

ENTRY_POINTS(linear)

// Computes the norm: x [..., H], weight [H], NormNumbers -> x * weight / sqrt(mean(x^2) + eps).
ENTRY_POINT(rms_norm) {
  auto p = reinterpret_cast<float **>(params);
  const float epsilon = static_cast<const NormNumbers *>(params[2])->epsilon;
  const int64_t size = shapes[1][0], rows = count(shapes[0], ndims[0]) / size;
  parallel_pieces(rows, kRows,
                  [&](int64_t i, int64_t m) { norm_rows(p[0] + i * size, p[1], epsilon, p[3] + i * size, m, size); });
  return 0;
}

// Computes the norm's gradient: dy, x [..., H], weight [H], NormNumbers -> dx, dweight [H].
ENTRY_POINT(rms_norm_gradient) {
  auto p = reinterpret_cast<float **>(params);
  const float epsilon = static_cast<const NormNumbers *>(params[3])->epsilon;
  const int64_t size = shapes[2][0], rows = count(shapes[0], ndims[0]) / size;
  const int64_t parts = (rows + kRows - 1) / kRows;
  std::vector<float> partial(parts * size, 0.0f);
  parallel_pieces(rows, kRows, [&](int64_t first, int64_t m) {
    norm_gradient_rows(p[0] + first * size, p[1] + first * size, p[2], epsilon, p[4] + first * size,
                       partial.data() + first / kRows * size, m, size);
  });
  std::fill(p[5], p[5] + size, 0.0f);
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t j = 0; j < size; ++j) p[5][j] += partial[part * size + j];
  }
  return 0;
}
