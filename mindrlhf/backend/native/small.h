// Small operators: linear maps, norms, rotations, gates.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "matrix.h"
#include "team.h"

extern "C" {

// x [T, in], weight [out, in] -> y [T, out]
int linear(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  linear_any(p[0], p[1], nullptr, p[2], shapes[0][0], shapes[0][1], shapes[1][0]);
  return 0;
}

// The same with a bias [out] before y.
int linear_bias(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  linear_any(p[0], p[1], p[2], p[3], shapes[0][0], shapes[0][1], shapes[1][0]);
  return 0;
}

// dy [T, out], weight [out, in] -> dx [T, in]
int linear_input_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  input_gradient(p[0], p[1], p[2], shapes[0][0], shapes[1][1], shapes[0][1]);
  return 0;
}

// dy [T, out], x [T, in] -> dweight [out, in]
int linear_weight_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  weight_gradients({{shapes[0][0], p[0], p[1], p[2], shapes[0][1], shapes[1][1]}}, false);
  return 0;
}

// dy [T, out] -> dbias [out]
int bias_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t rows = shapes[0][0], out = shapes[0][1];
  std::fill(p[1], p[1] + out, 0.0f);
  add_rows(p[0], rows, out, p[1]);
  return 0;
}

// ------------------------------------------------------------------------------------------------ element by element

// x [..., H], weight [H], eps [1] -> x * weight / sqrt(mean(x^2) + eps)
int rms_norm(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t size = shapes[1][0], rows = count(shapes[0], ndims[0]) / size;
  pieces(rows, kRows, [&](int64_t i, int64_t m) { norm_rows(p[0] + i * size, p[1], *p[2], p[3] + i * size, m, size); });
  return 0;
}

// dy, x [..., H], weight [H], eps [1] -> dx, dweight [H]
int rms_norm_gradient(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t size = shapes[2][0], rows = count(shapes[0], ndims[0]) / size;
  const int64_t parts = (rows + kRows - 1) / kRows;
  std::vector<float> partial(parts * size, 0.0f);
  pieces(rows, kRows, [&](int64_t first, int64_t m) {
    norm_gradient_rows(p[0] + first * size, p[1] + first * size, p[2], *p[3], p[4] + first * size,
                       partial.data() + first / kRows * size, m, size);
  });
  std::fill(p[5], p[5] + size, 0.0f);
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t j = 0; j < size; ++j) p[5][j] += partial[part * size + j];
  }
  return 0;
}

// x [1, T, heads, d], cos, sin [1, T, 1, d], sign [1] -> x turned by the angles, or back for sign -1
int rotary(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t rows = shapes[0][1], heads = shapes[0][2], d = shapes[0][3];
  const float sign = *p[3];
  pieces(rows, kRows, [&](int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) {
      turn(p[0] + i * heads * d, p[1] + i * d, p[2] + i * d, sign, p[4] + i * heads * d, heads, d);
    }
  });
  return 0;
}

// gate, up [T, I] -> silu(gate) * up
int swiglu(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  pieces(count(shapes[0], ndims[0]), 1 << 15, [&](int64_t first, int64_t m) {
    gated(p[0] + first, p[1] + first, p[2] + first, m);
  });
  return 0;
}

// dy, gate, up [T, I] -> dgate, dup
int swiglu_gradient(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  pieces(count(shapes[0], ndims[0]), 1 << 15, [&](int64_t first, int64_t m) {
    gated_gradient(p[0] + first, p[1] + first, p[2] + first, p[3] + first, p[4] + first, m);
  });
  return 0;
}

}  // extern "C"
