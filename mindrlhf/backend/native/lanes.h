// Vector math on rows of numbers: sums, softmax, norms, rotations, gates.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "factors.h"
#include "vectors.h"

namespace {

// Returns e^x within 2 units in the last place (Cody & Waite's reduction, a polynomial of degree 7); NaN stays NaN. It is
// always inlined: a loop that calls it as a function works on one number at a time.
__attribute__((always_inline)) inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// Returns the sum of term(i) for 0 <= i < n.
template <typename Term>
__attribute__((always_inline)) inline float sum_over(int64_t n, Term term) {
  Lanes total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    float terms[kLanes];
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) terms[j] = term(i + j);
    total += lanes(terms);
  }
  float rest = 0;
  for (; i < n; ++i) rest += term(i);
  return sum_of(total) + rest;
}

inline float largest(const float *x, int64_t n) {
  float top = x[0];
  int64_t i = 0;
  if (n >= kLanes) {
    Lanes tops = lanes(x);
    for (; i + kLanes <= n; i += kLanes) tops = larger(lanes(x + i), tops);
    float found[kLanes];
    store(tops, found);
    for (int64_t j = 0; j < kLanes; ++j) top = std::max(top, found[j]);
  }
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

// Replaces x [n] by exp(x - max(x)) / sum(exp(x - max(x))).
inline void softmax(float *x, int64_t n) {
  const float top = largest(x, n);
  const float inverse = 1.0f / sum_over(n, [=](int64_t i) INLINE { return x[i] = exponential(x[i] - top); });
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
}

// Computes y = x * weight / sqrt(mean(x^2) + eps) for `rows` rows [size].
template <typename Number>
void norm_rows(const float *x, const float *weight, float eps, Number *y, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; ++i, x += size, y += size) {
    const float squares = sum_over(size, [=](int64_t j) INLINE { return x[j] * x[j]; });
    const float scale = 1.0f / std::sqrt(squares / size + eps);
    fill(y, size, [=](int64_t j) INLINE { return x[j] * scale * weight[j]; });
  }
}

// Computes the gradient dx of `norm_rows` for `rows` rows [size], and adds the weight's gradient to `sum` [size]. dx may be
// the same array as x. add: adds to dx instead of overwriting it.
void norm_gradient_rows(const float *dy, const float *x, const float *weight, float eps, float *dx, float *sum,
                        int64_t rows, int64_t size, bool add = false) {
  for (int64_t i = 0; i < rows; ++i, dy += size, x += size, dx += size) {
    const float squares = sum_over(size, [=](int64_t j) INLINE { return x[j] * x[j]; });
    const float product = sum_over(size, [=](int64_t j) INLINE { return dy[j] * weight[j] * x[j]; });
    const float scale = 1.0f / std::sqrt(squares / size + eps);
    const float back = product * scale * scale * scale / size;
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) {
      const float before = add ? dx[j] : 0.0f, own = x[j];
      sum[j] += dy[j] * own * scale;
      dx[j] = before + dy[j] * weight[j] * scale - own * back;
    }
  }
}

// Rotates the heads of one token, x [heads, d], by the token's angles; sign -1 rotates back. y may be the same array as x.
void turn(const float *x, const float *cos, const float *sin, float sign, float *y, int64_t heads, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t h = 0; h < heads; ++h, x += d, y += d) {
#pragma omp simd
    for (int64_t j = 0; j < half; ++j) {
      const float low = x[j], high = x[half + j];
      y[j] = low * cos[j] - sign * high * sin[j];
      y[half + j] = high * cos[half + j] + sign * low * sin[half + j];
    }
  }
}

// Computes y = silu(gate) * up for n numbers; y may be the same array as gate.
template <typename Number>
void gated(const float *gate, const float *up, Number *y, int64_t n) {
  fill(y, n, [=](int64_t i) INLINE { return gate[i] / (1.0f + exponential(-gate[i])) * up[i]; });
}

// Computes d_gate and d_up from dy, the gradient of the result of `gated`; they may be the same arrays as gate and up.
template <typename Number>
void gated_gradient(const float *dy, const float *gate, const float *up, Number *d_gate, Number *d_up, int64_t n) {
  const int64_t near = 64;  // numbers per step
  float gate_slopes[near], up_slopes[near];
  for (; n > 0; n -= near, dy += near, gate += near, up += near, d_gate += near, d_up += near) {
    const int64_t size = std::min(n, near);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float slope = dy[i], g = gate[i], u = up[i], sigmoid = 1.0f / (1.0f + exponential(-g));
      gate_slopes[i] = slope * u * sigmoid * (1.0f + g * (1.0f - sigmoid));
      up_slopes[i] = slope * g * sigmoid;
    }
    round_numbers(gate_slopes, size, d_gate);
    round_numbers(up_slopes, size, d_up);
  }
}

// Returns memory for `numbers` floats, aligned to 64 bytes. Each thread has one block, which it reuses and grows.
float *scratch(int64_t numbers) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < numbers + 16) memory.resize(numbers + 16);
  return reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

}  // namespace
