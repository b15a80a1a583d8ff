// Updates with rounded moments: bfloat16 numbers, or 8-bit codes (`mindrlhf.optimizer_state`), rounded by random numbers.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "names.h"
#include "optimizer.h"
#include "team.h"

namespace {

const int64_t kMomentBlock = 128;  // numbers of a row under one scale; see `mindrlhf.optimizer_state`
const float kLeastScale = 0x1p-90f;

__attribute__((always_inline)) inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

__attribute__((always_inline)) inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Returns the part behind the point of a + b, both in [0, 1): the random number of a row and of a column.
__attribute__((always_inline)) inline float draw(float a, float b) {
  const float sum = a + b;
  return sum >= 1 ? sum - 1 : sum;
}

// Returns the scale of a block with this largest magnitude.
inline float scale_of(float largest) {
  if (!(largest > 0)) return 0;
  const uint32_t bits = bits_of(largest);
  const float power = float_of(bits & 0x7F800000u);
  return std::max((bits & 0x7FFFFFu) > 0x700000u ? 2 * power : power, kLeastScale);
}

// Rounds x to the upper half of its bits: to the larger magnitude if `uniform` is below its share of the way.
__attribute__((always_inline)) inline uint16_t half_of(float x, float uniform) {
  const uint32_t bits = bits_of(x);
  return static_cast<uint16_t>((bits >> 16) + (uniform * 65536 < static_cast<float>(static_cast<int32_t>(bits & 0xFFFFu))));
}

// Codes of the first moment: a sign, 4 bits of exponent, 3 of mantissa, with zero and subnormal numbers.
__attribute__((always_inline)) inline float first_value(int32_t code) {
  const int32_t size = code < 0 ? -code : code;
  const float small = static_cast<float>(size) * 0x1p-17f;
  const float value = size < 8 ? small : float_of(static_cast<uint32_t>(size + 896) << 20);
  return code < 0 ? -value : value;
}

// x: under a scale of 1. Masks of integers in place of conditions, which GCC turns into branches.
__attribute__((always_inline)) inline int32_t first_code(float x, float uniform) {
  const int32_t whole = static_cast<int32_t>(bits_of(x)), bits = whole & 0x7FFFFFFF, sign = whole >> 31;
  const float share = static_cast<float>(bits & 0xFFFFF) * 0x1p-20f;
  const int32_t normal = (bits >> 20) - 896 + (uniform < share);
  const float steps = float_of(bits) * 0x1p17f;
  const int32_t few = static_cast<int32_t>(steps);
  const int32_t small = few + (uniform < steps - static_cast<float>(few));
  const int32_t is_small = (bits - 0x38800000) >> 31;  // below 2^-14: all bits
  const int32_t code = normal ^ ((small ^ normal) & is_small);
  return (code ^ sign) - sign;
}

// Codes of the second moment: 5 bits of exponent, 3 of mantissa, without zero.
__attribute__((always_inline)) inline float second_value(int32_t code) {
  return float_of(static_cast<uint32_t>(code + 768) << 20);
}

__attribute__((always_inline)) inline int32_t second_code(float x, float uniform) {
  const uint32_t bits = bits_of(x < 0x1p-31f ? 0x1p-31f : x);
  return static_cast<int32_t>(bits >> 20) - 768 + (uniform < static_cast<float>(static_cast<int32_t>(bits & 0xFFFFFu)) * 0x1p-20f);
}

// Makes an update in place, and leaves the new moments in m and v.
__attribute__((always_inline)) inline void step(const UpdateNumbers &n, float decay, int64_t size, float *w, float *g,
                                                float *m, float *v) {
#pragma omp simd
  for (int64_t j = 0; j < size; ++j) {
    const float slope = g[j] * n.scale;
    m[j] = n.beta1 * m[j] + (1 - n.beta1) * slope;
    v[j] = n.beta2 * v[j] + (1 - n.beta2) * slope * slope;
    w[j] -= n.rate * (m[j] / (std::sqrt(v[j]) + n.epsilon) + decay * w[j]);
    g[j] = 0;
  }
}

// A block of a row. w, g: its weights and gradient. at: its number in the parameter. row: the row's random number. one, two:
// those of its columns, for both moments.
struct Piece {
  int64_t size;
  float *w, *g;
  int64_t at, scale_at;
  float row;
  const float *one, *two;
};

struct BFloat16Moments {
  static const int arrays = 2;  // of a parameter
  uint16_t *first, *second;

  explicit BFloat16Moments(void *const *arrays)
      : first(static_cast<uint16_t *>(arrays[0])), second(static_cast<uint16_t *>(arrays[1])) {}

  void update(const UpdateNumbers &n, float decay, const Piece &piece) const {
    float m[kMomentBlock], v[kMomentBlock];
    uint16_t *a = first + piece.at, *b = second + piece.at;
#pragma omp simd
    for (int64_t j = 0; j < piece.size; ++j) {
      m[j] = float_of(static_cast<uint32_t>(a[j]) << 16);
      v[j] = float_of(static_cast<uint32_t>(b[j]) << 16);
    }
    step(n, decay, piece.size, piece.w, piece.g, m, v);
#pragma omp simd
    for (int64_t j = 0; j < piece.size; ++j) {
      a[j] = half_of(m[j], draw(piece.row, piece.one[j]));
      b[j] = half_of(v[j], draw(piece.row, piece.two[j]));
    }
  }
};

struct Int8Moments {
  static const int arrays = 4;
  int8_t *first;
  uint8_t *second;
  float *first_scales, *second_scales;

  explicit Int8Moments(void *const *arrays)
      : first(static_cast<int8_t *>(arrays[0])),
        second(static_cast<uint8_t *>(arrays[1])),
        first_scales(static_cast<float *>(arrays[2])),
        second_scales(static_cast<float *>(arrays[3])) {}

  void update(const UpdateNumbers &n, float decay, const Piece &piece) const {
    // Copies on the stack: bytes in memory may be anything's, and the compiler would load all else again after each.
    const int64_t size = piece.size;
    const float row = piece.row, *one = piece.one, *two = piece.two;
    float m[kMomentBlock], v[kMomentBlock];
    int8_t a[kMomentBlock];
    uint8_t b[kMomentBlock];
    std::memcpy(a, first + piece.at, size);
    std::memcpy(b, second + piece.at, size);
    const float a_old = first_scales[piece.scale_at], b_old = second_scales[piece.scale_at];
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) {
      m[j] = first_value(a[j]) * a_old;
      v[j] = second_value(b[j]) * b_old;
    }
    step(n, decay, size, piece.w, piece.g, m, v);
    float a_top = 0, b_top = 0;
#pragma omp simd reduction(max : a_top, b_top)
    for (int64_t j = 0; j < size; ++j) {
      const float magnitude = std::fabs(m[j]);
      a_top = magnitude > a_top ? magnitude : a_top;
      b_top = v[j] > b_top ? v[j] : b_top;
    }
    const float a_scale = scale_of(a_top), b_scale = scale_of(b_top);
    const float a_inverse = a_scale > 0 ? 1 / a_scale : 0, b_inverse = b_scale > 0 ? 1 / b_scale : 0;
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) a[j] = static_cast<int8_t>(first_code(m[j] * a_inverse, draw(row, one[j])));
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) b[j] = static_cast<uint8_t>(second_code(v[j] * b_inverse, draw(row, two[j])));
    std::memcpy(first + piece.at, a, size);
    std::memcpy(second + piece.at, b, size);
    first_scales[piece.scale_at] = a_scale, second_scales[piece.scale_at] = b_scale;
  }
};

// A parameter's arrays: weights, gradient, moments, at `params[first + i * tensors]`.
template <typename Moments>
int rounded_update(int nparam, void **params, int *ndims, int64_t **shapes) {
  const UpdateNumbers n = *static_cast<const UpdateNumbers *>(params[0]);
  const int32_t *layout = static_cast<const int32_t *>(params[1]);
  const float *rows = static_cast<const float *>(params[2]), *columns = static_cast<const float *>(params[3]);
  const int64_t width = shapes[3][1];
  const int tensors = (nparam - 5) / (2 + Moments::arrays);
  struct Rows {
    int tensor;
    int64_t first, count, draws;
  };
  std::vector<Rows> parts;
  int64_t draws = 0;
  for (int i = 0; i < tensors; ++i) {
    const int64_t size = shapes[4 + i][ndims[4 + i] - 1], all = size ? count(shapes[4 + i], ndims[4 + i]) / size : 0;
    const int64_t each = std::max<int64_t>(1, kNumbers / std::max<int64_t>(size, 1));
    for (int64_t j = 0; j < all; j += each) parts.push_back({i, j, std::min(each, all - j), draws});
    draws += all;
  }
  parallel_pieces(parts.size(), 1, [&](int64_t index, int64_t) {
    const Rows &part = parts[index];
    const int at = 4 + part.tensor;
    const int64_t size = shapes[at][ndims[at] - 1], blocks = (size + kMomentBlock - 1) / kMomentBlock;
    const int64_t row = count(shapes[at], ndims[at]) / shapes[at][0];
    void *arrays[Moments::arrays];
    for (int i = 0; i < Moments::arrays; ++i) arrays[i] = params[at + (2 + i) * tensors];
    const Moments moments(arrays);
    float *w = static_cast<float *>(params[at]);
    float *g = static_cast<float *>(params[at + tensors]) + layout[3 * part.tensor] * row;
    const float decay = layout[3 * part.tensor + 1] ? n.decay : 0;
    const float *one = columns + layout[3 * part.tensor + 2], *two = one + width;
    for (int64_t i = part.first; i < part.first + part.count; ++i) {
      for (int64_t j = 0; j < blocks; ++j) {
        const int64_t from = j * kMomentBlock, begin = i * size + from;
        moments.update(n, decay, Piece{std::min(kMomentBlock, size - from), w + begin, g + begin, begin, i * blocks + j,
                                       rows[part.draws + i], one + from, two + from});
      }
    }
  });
  for (int i = 0; i < tensors; ++i) {  // zeroes gradient rows outside of the parameter
    const int at = 4 + i + tensors;
    if (count(shapes[at], ndims[at]) == count(shapes[4 + i], ndims[4 + i])) continue;
    parallel_pieces(count(shapes[at], ndims[at]), kNumbers, [&](int64_t j, int64_t size) {
      float *g = static_cast<float *>(params[at]);
      std::fill(g + j, g + j + size, 0);
    });
  }
  static_cast<float *>(params[nparam - 1])[0] = n.rate;
  return 0;
}

}  // namespace

// Update parameters with rounded moments: UpdateNumbers; layout int32[3 * n]: for each parameter the first row of its
// gradient that belongs to it, whether it decays, and the first of its columns; random numbers in [0, 1) for all
// parameters' rows [sum of rows] and for columns [2, width]; n each of parameters and gradients, and of
// first and second moments (then of their scales); all overwritten -> [1].
ENTRY_POINT(adamw_bfloat16) { return rounded_update<BFloat16Moments>(nparam, params, ndims, shapes); }
ENTRY_POINT(adamw_int8) { return rounded_update<Int8Moments>(nparam, params, ndims, shapes); }
