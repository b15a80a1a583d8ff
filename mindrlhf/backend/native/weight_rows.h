// Rows of weights in a decode step: float, bfloat16 or int8 numbers, and their products with columns.
//
// Both factors are words of 32 bits: one float, two bfloat16 or four int8 numbers that follow each other along the inner
// dimension. A word of a row meets the words of 16 or 32 columns at once. Every number of a result has one sum, in the order
// of the inner dimension: it does not depend on the number of rows or columns around it.

#pragma once

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "factors.h"
#include "lanes.h"
#include "team.h"

namespace {

typedef int32_t Word __attribute__((may_alias));
typedef int32_t Words __attribute__((vector_size(64)));

const int64_t kTile = 32;         // columns of a product at most, and half as many at least
const int64_t kBlock = 64;        // int8 numbers that share a scale
const int64_t kBlockWords = kBlock / 4;

// Rows: block after block, each its scale and 64 numbers, 128 added. Columns: each block their scales, -128 times the sums
// of their numbers, and the numbers.
struct Int8 {};

// Words of a row and of a column with `in` numbers. step: a sum and the products of a row's word, in all lanes, and columns'.
template <typename Number>
struct WordsOf;

template <>
struct WordsOf<float> {
  static int64_t row(int64_t in) { return in; }
  static int64_t column(int64_t in) { return in; }
  __attribute__((always_inline)) static Lanes step(Lanes sum, Words w, Words x) {
    return sum + reinterpret_cast<Lanes>(w) * reinterpret_cast<Lanes>(x);
  }
};

template <>
struct WordsOf<BFloat16> {
  static int64_t row(int64_t in) { return (in + 1) / 2; }
  static int64_t column(int64_t in) { return (in + 1) / 2; }
  __attribute__((always_inline)) static Lanes step(Lanes sum, Words w, Words x) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(x));
#else
    const int32_t upper = static_cast<int32_t>(0xffff0000u);
    sum += reinterpret_cast<Lanes>(w << 16) * reinterpret_cast<Lanes>(x << 16);
    return sum + reinterpret_cast<Lanes>(w & upper) * reinterpret_cast<Lanes>(x & upper);
#endif
  }
};

template <>
struct WordsOf<Int8> {
  static int64_t blocks(int64_t in) { return (in + kBlock - 1) / kBlock; }
  static int64_t row(int64_t in) { return blocks(in) * (1 + kBlockWords); }
  static int64_t column(int64_t in) { return blocks(in) * (2 + kBlockWords); }
  __attribute__((always_inline)) static Words step(Words sum, Words w, Words x) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Words>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w),
                                                       reinterpret_cast<__m512i>(x)));
#else
    for (int i = 0; i < 4; ++i) sum += (w >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
    return sum;
#endif
  }
};

inline Words words(const Word *x) {
  Words all;
  std::memcpy(&all, x, sizeof(all));
  return all;
}

inline Word word_of(float x) {
  Word word;
  std::memcpy(&word, &x, 4);
  return word;
}

// The larger magnitude; NaN stays.
inline float larger(float most, float x) { return std::fabs(x) > most || x != x ? std::fabs(x) : most; }

// What numbers are multiplied by to have no magnitude over 127.
inline float int8_factor(float most) { return most > 0 ? 127.0f / most : 0.0f; }

inline Word int8_of(float x, float factor) { return static_cast<Word>(std::nearbyint(x * factor)); }

// A row of float numbers, packed.
template <typename Number>
void pack_row(Input from, int64_t in, Word *to) {
  if constexpr (std::is_same_v<Number, Int8>) {
    for (int64_t k = 0; k < in; k += kBlock, from += kBlock) {
      const int64_t size = std::min(kBlock, in - k);
      float most = 0;
      for (int64_t i = 0; i < size; ++i) most = larger(most, from[i]);
      const float factor = int8_factor(most);
      *to++ = word_of(most / 127.0f);
      for (int64_t i = 0; i < kBlock; i += 4) {
        uint32_t word = 0;
        for (int64_t j = 0; j < 4; ++j) {
          word |= static_cast<uint32_t>(128 + (i + j < size ? int8_of(from[i + j], factor) : 0)) << 8 * j;
        }
        *to++ = static_cast<Word>(word);
      }
    }
  } else {
    if (in % 2) to[in / 2] = 0;
    round_numbers(from, in, reinterpret_cast<BFloat16 *>(to));
  }
}

// The same of all rows [rows, in].
template <typename Number>
void pack_rows(Input from, int64_t rows, int64_t in, Word *to) {
  parallel_pieces(rows, 16, [&](int64_t first, int64_t n) {
    for (int64_t i = first; i < first + n; ++i) pack_row<Number>(from + i * in, in, to + i * WordsOf<Number>::row(in));
  });
}

// Numbers rounded to bfloat16 ones, in the upper halves of words.
inline Words bfloat16_bits(Lanes x) {
  typedef uint32_t Bits __attribute__((vector_size(64)));
  auto bits = reinterpret_cast<Bits>(x);
  bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
  return reinterpret_cast<Words>(bits & 0xffff0000u);
}

// The words of columns x [in, width]: x itself, or in `to`.
template <typename Number>
void column_words(const float *x, int64_t in, int64_t width, Word *to) {
  if constexpr (std::is_same_v<Number, Int8>) {
    for (int64_t k = 0; k < in; k += kBlock, x += kBlock * width, to += (2 + kBlockWords) * width) {
      const int64_t size = std::min(kBlock, in - k);
      float most[kTile] = {}, factor[kTile];
      int32_t sums[kTile] = {};
      for (int64_t i = 0; i < size; ++i) {
#pragma omp simd
        for (int64_t c = 0; c < width; ++c) most[c] = larger(most[c], x[i * width + c]);
      }
      for (int64_t c = 0; c < width; ++c) factor[c] = int8_factor(most[c]), to[c] = word_of(most[c] / 127.0f);
      for (int64_t i = 0; i < kBlock; i += 4) {
        Word *word = to + (2 + i / 4) * width;
        std::fill(word, word + width, 0);
        for (int64_t j = 0; j < 4 && i + j < size; ++j) {
          const float *own = x + (i + j) * width;
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) {
            const int32_t number = static_cast<int32_t>(std::nearbyint(own[c] * factor[c]));
            sums[c] += number;
            word[c] |= (number & 255) << 8 * j;
          }
        }
      }
      for (int64_t c = 0; c < width; ++c) to[width + c] = -128 * sums[c];
    }
  } else if constexpr (std::is_same_v<Number, BFloat16>) {
    for (int64_t k = 0; k < in; k += 2, x += 2 * width, to += width) {
      for (int64_t c = 0; c < width; c += kLanes) {
        const Words low = bfloat16_bits(lanes(x + c)), high = k + 1 < in ? bfloat16_bits(lanes(x + width + c)) : Words{};
        const Words both = (low >> 16 & 0xffff) | high;
        std::memcpy(to + c, &both, sizeof(both));
      }
    }
  }
}

// To the sums of R rows, which are `stride` words apart, and 16 V columns, the products of `count` words each.
template <typename Number, int R, int V, typename Sum>
__attribute__((always_inline)) inline void add_words(const Word *w, int64_t stride, int64_t count, const Word *x,
                                                     Sum (&sums)[R][V]) {
#pragma GCC unroll 4
  for (int64_t k = 0; k < count; ++k) {
    Words columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = words(x + (k * V + v) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Words row = Words{} + w[r * stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = WordsOf<Number>::step(sums[r][v], row, columns[v]);
    }
  }
}

// y [R, 16 V] is, or for `add` gets added, the product of R rows and the columns of x, of `in` numbers each.
template <typename Number, int R, int V>
void multiply_rows(const Word *w, int64_t in, const Word *x, bool add, float *y) {
  const int64_t stride = WordsOf<Number>::row(in);
  Lanes sums[R][V] = {};
  auto look_ahead = [&](int64_t word) {  // for the rows that come next
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (R + r) * stride + word, 0, 2);
  };
  if constexpr (std::is_same_v<Number, Int8>) {
    for (int64_t k = 0; k < stride; k += 1 + kBlockWords, x += (2 + kBlockWords) * V * kLanes) {
      look_ahead(k);
      Words products[R][V];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) products[r][v] = words(x + (V + v) * kLanes);
      }
      add_words<Number>(w + k + 1, stride, kBlockWords, x + 2 * V * kLanes, products);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const Lanes scale = reinterpret_cast<Lanes>(Words{} + w[r * stride + k]);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          const Lanes both = scale * reinterpret_cast<Lanes>(words(x + v * kLanes));
          sums[r][v] += __builtin_convertvector(products[r][v], Lanes) * both;
        }
      }
    }
  } else {
    int64_t k = 0;
    for (; k + kLanes <= stride; k += kLanes) {
      look_ahead(k);
      add_words<Number>(w + k, stride, kLanes, x + k * V * kLanes, sums);
    }
    add_words<Number>(w + k, stride, stride - k, x + k * V * kLanes, sums);
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v, y += kLanes) {
      if (add) sums[r][v] += lanes(y);
      std::memcpy(y, &sums[r][v], sizeof(Lanes));
    }
  }
}

// y [rows, width], likewise, of any number of rows; 16 or 32 columns.
template <typename Number>
void multiply(const Word *w, int64_t rows, int64_t in, const Word *x, int64_t width, bool add, float *y) {
#if defined(__AVX512F__)
  const int many = 8;
#else
  const int many = 2;  // of 16 registers
#endif
  auto go_on = [&](auto vectors) {
    const int V = decltype(vectors)::value;
    int64_t i = 0;
    const int64_t stride = WordsOf<Number>::row(in);
    for (; i + many <= rows; i += many) multiply_rows<Number, many, V>(w + i * stride, in, x, add, y + i * width);
    for (; i < rows; ++i) multiply_rows<Number, 1, V>(w + i * stride, in, x, add, y + i * width);
  };
  if (width == kLanes) return go_on(std::integral_constant<int, 1>());
  go_on(std::integral_constant<int, 2>());
}

}  // namespace

extern "C" {

// A float array [rows, in] as rows of packed numbers.
void pack_bfloat16(const float *from, int64_t rows, int64_t in, int32_t *to) { pack_rows<BFloat16>(from, rows, in, to); }
void pack_int8(const float *from, int64_t rows, int64_t in, int32_t *to) { pack_rows<Int8>(from, rows, in, to); }

// Words of such a row.
int64_t row_words_bfloat16(int64_t in) { return WordsOf<BFloat16>::row(in); }
int64_t row_words_int8(int64_t in) { return WordsOf<Int8>::row(in); }

}  // extern "C"
