// Products of float rows with columns, computed in registers. Rows come from memory; columns are in the cache.

#pragma once

#if defined(__FMA__)
#include <immintrin.h>
#endif
#include <cstdint>
#include <type_traits>

#include "vectors.h"

namespace {

// Half of a 512-bit register.
typedef float HalfFloats __attribute__((vector_size(32)));

// Returns sum + a * b. Compilers do not always emit one instruction for it, and two instructions give different last bits.
#if defined(__FMA__)
inline HalfFloats plus_product(HalfFloats sum, float a, HalfFloats b) { return _mm256_fmadd_ps(_mm256_set1_ps(a), b, sum); }
#endif
template <typename Vector>
Vector plus_product(Vector sum, float a, Vector b) {
  return sum + a * b;
}

// Multiplies R rows [R, in] by V vectors of the columns x [in, width]. Writes the product to y [R, width], or adds it if
// `add` is true.
template <typename Vector, int R, int V>
void register_product(const float *rows, int64_t in, const float *x, int64_t width, bool add, float *y) {
  const int64_t size = sizeof(Vector) / sizeof(float), ahead = 16;
  Vector sums[R][V] = {};
  auto go_on = [&](int64_t first, int64_t last) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t i = first; i < last; ++i) {
      Vector row[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) row[v] = load<Vector>(x + i * width + v * size);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[r][v] = plus_product(sums[r][v], rows[r * in + i], row[v]);
      }
    }
  };
  int64_t i = 0;
  for (; i + ahead <= in; i += ahead) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) __builtin_prefetch(rows + (R + r) * in + i, 0, 2);  // the next R rows
    go_on(i, i + ahead);
  }
  go_on(i, in);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float *to = y + r * width + v * size;
      store(add ? load<Vector>(to) + sums[r][v] : sums[r][v], to);
    }
  }
}

// The same for all rows [count, in] and all `width` columns, a multiple of 8. Each number is one sum in the order of the
// inner dimension.
inline void register_products(int64_t count, const float *rows, int64_t in, const float *x, int64_t width, bool add,
                              float *y) {
  auto columns = [&](auto vector, auto vectors, int64_t j) {
    using Vector = decltype(vector);
    const int V = decltype(vectors)::value, many = kRegister == kLanes ? 8 : 8 / V;  // there are 32 registers, or 16
    int64_t i = 0;
    auto several = [&](auto number) {
      const int R = decltype(number)::value;
      for (; i + R <= count; i += R) register_product<Vector, R, V>(rows + i * in, in, x + j, width, add, y + i * width + j);
    };
    several(std::integral_constant<int, many>());
    several(std::integral_constant<int, 2>());
    several(std::integral_constant<int, 1>());
  };
  int64_t j = 0;
  for (; j + 2 * kRegister <= width; j += 2 * kRegister) columns(Floats{}, std::integral_constant<int, 2>(), j);
  for (; j + kRegister <= width; j += kRegister) columns(Floats{}, std::integral_constant<int, 1>(), j);
  if (kRegister > 8 && j < width) columns(HalfFloats{}, std::integral_constant<int, 1>(), j);
}

}  // namespace
