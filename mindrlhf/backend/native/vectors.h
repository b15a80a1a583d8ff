// SIMD vectors of one processor register, and groups of sixteen numbers in one or several registers.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
const int kRegister = 16;  // 32-bit numbers per register
#elif defined(__AVX__)
const int kRegister = 8;
#else
const int kRegister = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kRegister)));
typedef int32_t Words __attribute__((vector_size(4 * kRegister)));

template <typename Register, typename Number>
__attribute__((always_inline)) inline Register load(const Number *x) {
  Register all;
  std::memcpy(&all, x, sizeof(all));
  return all;
}

template <typename Register, typename Number>
__attribute__((always_inline)) inline void store(const Register &x, Number *to) {
  std::memcpy(static_cast<void *>(to), &x, sizeof(x));
}

// Sixteen 32-bit numbers for any register size. One vector of sixteen would stay in memory if registers are smaller.
const int64_t kLanes = 16;
const int kParts = kLanes / kRegister;
template <typename Register>
struct Sixteen {
  Register part[kParts];
};

// Builds sixteen numbers; register i is term(i).
template <typename Term>
__attribute__((always_inline)) inline auto sixteen(Term term) {
  Sixteen<decltype(term(0))> all;
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) all.part[i] = term(i);
  return all;
}

// Sixteen floats that are added in parallel: compilers generate slow code for a sum in one fixed order.
typedef Sixteen<Floats> Lanes;

__attribute__((always_inline)) inline Lanes lanes(const float *x) {
  return sixteen([=](int i) { return load<Floats>(x + i * kRegister); });
}
__attribute__((always_inline)) inline void store(const Lanes &x, float *to) {
#pragma GCC unroll 4
  for (int i = 0; i < kParts; ++i) store(x.part[i], to + i * kRegister);
}
__attribute__((always_inline)) inline Lanes operator+(const Lanes &x, const Lanes &y) {
  return sixteen([&](int i) { return x.part[i] + y.part[i]; });
}
__attribute__((always_inline)) inline Lanes operator*(const Lanes &x, const Lanes &y) {
  return sixteen([&](int i) { return x.part[i] * y.part[i]; });
}
__attribute__((always_inline)) inline Lanes operator*(float x, const Lanes &y) {
  return sixteen([&](int i) { return x * y.part[i]; });
}
__attribute__((always_inline)) inline void operator+=(Lanes &x, const Lanes &y) { x = x + y; }
__attribute__((always_inline)) inline Lanes larger(const Lanes &x, const Lanes &y) {
  return sixteen([&](int i) { return x.part[i] > y.part[i] ? x.part[i] : y.part[i]; });
}

// Returns the sum of the sixteen numbers: adds the second half to the first half until one number remains.
__attribute__((always_inline)) inline float sum_of(const Lanes &x) {
#if defined(__AVX512F__)
  Floats y = x.part[0];
  y += __builtin_shuffle(y, Words{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  y += __builtin_shuffle(y, Words{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  y += __builtin_shuffle(y, Words{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return y[0] + y[1];
#elif defined(__AVX__)
  Floats y = x.part[0] + x.part[1];
  y += __builtin_shuffle(y, Words{4, 5, 6, 7, 0, 1, 2, 3});
  y += __builtin_shuffle(y, Words{2, 3, 0, 1, 6, 7, 4, 5});
  return y[0] + y[1];
#else
  const Floats y = (x.part[0] + x.part[2]) + (x.part[1] + x.part[3]);
  return (y[0] + y[2]) + (y[1] + y[3]);
#endif
}

// Returns `sum_of` of each of the sixteen x[i], with exactly the same bits. Overwrites x.
inline Lanes sums_of(Lanes *x) {
#if defined(__AVX512F__)
  auto fold = [x](int count, Words low, Words high) {
    for (int i = 0; i < count; ++i) {
      const Floats one = x[2 * i].part[0], two = x[2 * i + 1].part[0];
      x[i].part[0] = __builtin_shuffle(one, two, low) + __builtin_shuffle(one, two, high);
    }
  };
  fold(8, Words{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
       Words{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  fold(4, Words{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
       Words{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
  fold(2, Words{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
       Words{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
  fold(1, Words{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
       Words{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  return x[0];
#elif defined(__AVX__)
  Floats y[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) y[i] = x[i].part[0] + x[i].part[1];
  auto fold = [&](int count, Words low, Words high) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      y[i] = __builtin_shuffle(y[2 * i], y[2 * i + 1], low) + __builtin_shuffle(y[2 * i], y[2 * i + 1], high);
    }
  };
  fold(8, Words{0, 1, 2, 3, 8, 9, 10, 11}, Words{4, 5, 6, 7, 12, 13, 14, 15});
  fold(4, Words{0, 1, 4, 5, 8, 9, 12, 13}, Words{2, 3, 6, 7, 10, 11, 14, 15});
  fold(2, Words{0, 2, 4, 6, 8, 10, 12, 14}, Words{1, 3, 5, 7, 9, 11, 13, 15});
  return sixteen([&](int i) { return y[i]; });
#else
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = sum_of(x[i]);
  return lanes(sums);
#endif
}

}  // namespace
