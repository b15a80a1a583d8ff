// Vector maths on rows of numbers: sums, softmax, norms, rotations, gates.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "factors.h"

namespace {

// e^x to 2 units in the last place (Cody & Waite's reduction, a polynomial of degree 6); NaN stays NaN. A loop that calls
// it, rather than having it inside, works on one number at a time.
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

// Numbers that are added up side by side, whatever the registers hold: compilers are slow at sums in a fixed order.
typedef float Lanes __attribute__((vector_size(64)));
const int64_t kLanes = 16;

inline Lanes lanes(const float *x) {
  Lanes all;
  std::memcpy(&all, x, sizeof(all));
  return all;
}

typedef int32_t Order __attribute__((vector_size(64)));

inline float sum_of(Lanes x) {
  x += __builtin_shuffle(x, Order{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, Order{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  x += __builtin_shuffle(x, Order{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return x[0] + x[1];
}

// The sixteen `sum_of`, to the last bit. x is overwritten.
inline Lanes sums_of(Lanes *x) {
  auto fold = [x](int count, Order low, Order high) {
    for (int i = 0; i < count; ++i) {
      x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high);
    }
  };
  fold(8, Order{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
       Order{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  fold(4, Order{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
       Order{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
  fold(2, Order{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
       Order{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
  fold(1, Order{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
       Order{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  return x[0];
}

// The sum of term(i) for i below n.
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
    for (; i + kLanes <= n; i += kLanes) tops = lanes(x + i) > tops ? lanes(x + i) : tops;
    for (int64_t j = 0; j < kLanes; ++j) top = std::max(top, tops[j]);
  }
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

// x becomes exp(x - its largest) / their sum.
inline void softmax(float *x, int64_t n) {
  const float top = largest(x, n);
  const float inverse = 1.0f / sum_over(n, [=](int64_t i) { return x[i] = exponential(x[i] - top); });
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
}

// y = x * weight / sqrt(mean(x^2) + eps) of `rows` rows
template <typename Number>
void norm_rows(const float *x, const float *weight, float eps, Number *y, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; ++i, x += size, y += size) {
    const float squares = sum_over(size, [=](int64_t j) { return x[j] * x[j]; });
    const float scale = 1.0f / std::sqrt(squares / size + eps);
    fill(y, size, [=](int64_t j) { return x[j] * scale * weight[j]; });
  }
}

// dx of `rows` rows, which may take the place of x; to `sum` [size] the gradient of the weight is added. add: dx to what is
// there.
void norm_gradient_rows(const float *dy, const float *x, const float *weight, float eps, float *dx, float *sum,
                        int64_t rows, int64_t size, bool add = false) {
  for (int64_t i = 0; i < rows; ++i, dy += size, x += size, dx += size) {
    const float squares = sum_over(size, [=](int64_t j) { return x[j] * x[j]; });
    const float product = sum_over(size, [=](int64_t j) { return dy[j] * weight[j] * x[j]; });
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

// The heads of one token, x [heads, d], turned by its angles (or back, for sign -1); x and y may be the same.
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

// y = silu(gate) * up; y may be gate
template <typename Number>
void gated(const float *gate, const float *up, Number *y, int64_t n) {
  fill(y, n, [=](int64_t i) { return gate[i] / (1.0f + exponential(-gate[i])) * up[i]; });
}

// Gradients of gate and up from that of what `gated` makes of them; they may take the place of gate and up.
template <typename Number>
void gated_gradient(const float *dy, const float *gate, const float *up, Number *d_gate, Number *d_up, int64_t n) {
  const int64_t near = 64;  // numbers at a time
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

// One memory block for each thread, which grows and is kept: 64 bytes aligned.
float *scratch(int64_t numbers) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < numbers + 16) memory.resize(numbers + 16);
  return reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

}  // namespace
