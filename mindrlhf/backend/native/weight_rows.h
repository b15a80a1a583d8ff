// Weights in a decode step (float, bfloat16 or int8 numbers) and their products with columns.
//
// Both factors consist of 32-bit words: one float, two bfloat16 or four int8 numbers, consecutive along the inner dimension.
// Float weights keep their layout: a word of a row is multiplied by words of 16 or 32 columns at once. Packed weights are
// stored in panels: a word of a column is multiplied by words of 16 rows at once. Each number of a result is one sum in the
// order of the inner dimension, so it does not depend on the number of rows or columns.

#pragma once

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#endif
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "factors.h"
#include "lanes.h"
#include "register_products.h"
#include "team.h"
#include "vectors.h"

namespace {

typedef int32_t Word __attribute__((may_alias));

const int64_t kTile = 32;   // most columns of a product
const int64_t kPanel = 16;  // interleaved packed rows: first word of each, then second, ...; the last panel may have fewer
const int64_t kBlock = 64;  // int8 numbers that share a scale
const int64_t kBlockWords = kBlock / 4;

// The number of columns of a product is a multiple of this.
template <typename Number>
constexpr int64_t kLeastColumns = std::is_same_v<Number, float> ? std::max(kRegister, 8) : 8;

// Int8 numbers. A row has, for each block, a scale and 64 numbers with 128 added to each. Columns have, for each block,
// their scales, the start values of their sums of products, and the numbers.
struct Int8 {};

// row, column: the words of a row and of a column with `in` numbers. each: column words per row word. step: returns a sum
// plus the products of one word of each packed row, w, and the words of one column, from x on.
template <typename Number>
struct WordsOf;

template <>
struct WordsOf<float> {
  static int64_t row(int64_t in) { return in; }
  static int64_t column(int64_t in) { return in; }
};

template <>
struct WordsOf<BFloat16> {
  static int64_t row(int64_t in) { return (in + 1) / 2; }
  static int64_t column(int64_t in) { return (in + 1) / 2 * each; }
#if defined(__AVX512BF16__)
  static const int each = 1;
  __attribute__((always_inline)) static Floats step(Floats sum, Words w, const Word *x, int64_t) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(Words{} + *x));
  }
#else
  static const int each = 2;  // a column's bfloat16 numbers are stored as floats, lower half zero
  __attribute__((always_inline)) static Floats step(Floats sum, Words w, const Word *x, int64_t width) {
    const auto *column = reinterpret_cast<const float *>(x);
    sum += column[0] * reinterpret_cast<Floats>(w << 16);
    return sum + column[width] * reinterpret_cast<Floats>(w & static_cast<int32_t>(0xffff0000u));
  }
#endif
};

template <>
struct WordsOf<Int8> {
  static int64_t blocks(int64_t in) { return (in + kBlock - 1) / kBlock; }
  static int64_t row(int64_t in) { return blocks(in) * (1 + kBlockWords); }
  static int64_t column(int64_t in) { return blocks(in) * (2 + kBlockWords); }
  static const int each = 1;
  // added: the part of the 128 in a row's numbers that `step` does not remove.
#if defined(__AVX2__) && !defined(__AVX512F__)
  static const int added = 0;
#else
  static const int added = 128;
#endif
  __attribute__((always_inline)) static Words step(Words sum, Words w, const Word *column, int64_t) {
    const Words x = Words{} + *column;
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Words>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w),
                                                       reinterpret_cast<__m512i>(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    // The sum of two products must fit into 16 bits: rows give magnitudes up to 127; columns get the product's sign.
    const auto row = reinterpret_cast<__m256i>(w ^ static_cast<int32_t>(0x80808080u));
    const __m256i with_sign = _mm256_sign_epi8(reinterpret_cast<__m256i>(x), row);
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(row), with_sign);
    return sum + reinterpret_cast<Words>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#else
    for (int i = 0; i < 4; ++i) sum += (w >> 8 * i & 255) * (x << (24 - 8 * i) >> 24);
    return sum;
#endif
  }
};

inline Word word_of(float x) {
  Word word;
  std::memcpy(&word, &x, 4);
  return word;
}

// Returns the larger of `most` and the magnitude of x; NaN stays NaN.
inline float larger(float most, float x) { return std::fabs(x) > most || x != x ? std::fabs(x) : most; }

// Returns the factor that scales numbers to magnitudes up to 127. most: their largest magnitude.
inline float int8_factor(float most) { return most > 0 ? 127.0f / most : 0.0f; }

inline Word int8_of(float x, float factor) { return static_cast<Word>(std::nearbyint(x * factor)); }

// Packs a row of `in` floats.
template <typename Number>
void pack_row(Input from, int64_t in, Word *to) {
  if constexpr (std::is_same_v<Number, Int8>) {
    for (int64_t k = 0; k < in; k += kBlock, from += kBlock) {
      const int64_t size = std::min(kBlock, in - k);
      float block[kBlock] = {}, mosts[kLanes] = {}, most = 0;
      std::copy(from, from + size, block);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
#pragma omp simd
        for (int64_t j = 0; j < kLanes; ++j) mosts[j] = larger(mosts[j], block[i + j]);
      }
      for (const float one : mosts) most = larger(most, one);
      const float factor = int8_factor(most);
      *to++ = word_of(most / 127.0f);
      uint8_t numbers[kBlock];
#pragma omp simd
      for (int64_t i = 0; i < kBlock; ++i) numbers[i] = static_cast<uint8_t>(128 + int8_of(block[i], factor));
      std::memcpy(to, numbers, sizeof(numbers));
      to += kBlockWords;
    }
  } else {
    if (in % 2) to[in / 2] = 0;
    round_numbers(from, in, reinterpret_cast<BFloat16 *>(to));
  }
}

__attribute__((always_inline)) inline Sixteen<Words> sixteen_words(const Word *x) {
  return sixteen([=](int i) { return load<Words>(x + i * kRegister); });
}

// Transposes N rows of sixteen words to sixteen rows of N words, stored one after another.
template <int N, typename Register>
__attribute__((always_inline)) inline void transpose(const Sixteen<Register> (&rows)[N], Word *to) {
#if defined(__AVX512F__)
  const Words low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Words high{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  Words x[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) x[i] = reinterpret_cast<Words>(rows[i].part[0]);
#pragma GCC unroll 4
  for (int once = 1; once < N; once *= 2) {
    Words y[N];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      y[2 * i] = __builtin_shuffle(x[i], x[i + N / 2], low);
      y[2 * i + 1] = __builtin_shuffle(x[i], x[i + N / 2], high);
    }
    std::memcpy(x, y, sizeof(x));
  }
  std::memcpy(to, x, sizeof(x));
#else
  Word from[N * kPanel];
  std::memcpy(from, rows, sizeof(from));
#pragma GCC unroll 16
  for (int i = 0; i < kPanel; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < N; ++j) to[i * N + j] = from[j * kPanel + i];
  }
#endif
}

// Packs all rows [rows, in] into panels.
template <typename Number>
void pack_rows(Input from, int64_t rows, int64_t in, Word *to) {
  const int64_t size = WordsOf<Number>::row(in);
  parallel_pieces(rows, kPanel, [&](int64_t first, int64_t n) {
    auto packed = reinterpret_cast<Word *>(scratch(n * size));
    for (int64_t i = 0; i < n; ++i) pack_row<Number>(from + (first + i) * in, in, packed + i * size);
    Word *panel = to + first * size;
    int64_t k = 0;
    for (; n == kPanel && k + kPanel <= size; k += kPanel) {
      Sixteen<Words> block[kPanel];
      for (int64_t i = 0; i < kPanel; ++i) block[i] = sixteen_words(packed + i * size + k);
      transpose(block, panel + k * kPanel);
    }
    for (; k < size; ++k) {
      for (int64_t i = 0; i < n; ++i) panel[k * n + i] = packed[i * size + k];
    }
  });
}

// Writes the words of the columns x [in, width] to `to`. Floats are words already: nothing is written.
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
      for (int64_t c = 0; c < width; ++c) to[width + c] = -WordsOf<Int8>::added * sums[c];
    }
  } else if constexpr (std::is_same_v<Number, BFloat16>) {
    const int64_t each = WordsOf<BFloat16>::each;
    for (int64_t k = 0; k < in; k += 2, x += 2 * width, to += each * width) {
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        const uint32_t low = rounded<BFloat16>(x[c]).bits;
        const uint32_t high = k + 1 < in ? rounded<BFloat16>(x[width + c]).bits : 0;
        to[c] = static_cast<Word>(each == 1 ? low | high << 16 : low << 16);
        if (each == 2) to[width + c] = static_cast<Word>(high << 16);
      }
    }
  }
}

// Loads one word of each row of a panel with `rows` rows.
template <bool kFull>
__attribute__((always_inline)) inline Sixteen<Words> panel_words(const Word *w, int64_t rows) {
  Word some[kPanel] = {};
  if constexpr (kFull) {
    __builtin_prefetch(w + 64 * kPanel, 0, 2);  // measured to be best: 4 KiB ahead
  } else {
    std::memcpy(some, w, rows * sizeof(Word));
    w = some;
  }
  return sixteen_words(w);
}

// Adds the products of `count` words of each panel row and each of C columns of x to the columns' sums.
template <typename Number, bool kFull, int C, typename Sum>
__attribute__((always_inline)) inline void add_words(const Word *w, int64_t rows, int64_t count, const Word *x,
                                                     int64_t width, Sum (&sums)[C]) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < count; ++k) {
    const Sixteen<Words> row = panel_words<kFull>(w + k * rows, rows);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
      const Word *column = x + k * WordsOf<Number>::each * width + c;
      sums[c] = sixteen([&](int i) { return WordsOf<Number>::step(sums[c].part[i], row.part[i], column, width); });
    }
  }
}

// Multiplies a panel by C columns of x. Writes the product to y [rows, width], or adds it if `add` is true.
template <typename Number, bool kFull, int C>
void multiply_panel(const Word *w, int64_t rows, int64_t in, const Word *x, int64_t width, bool add, float *y) {
  if (kFull) rows = kPanel;
  const int64_t size = WordsOf<Number>::row(in);
  Lanes sums[C] = {};
  if constexpr (std::is_same_v<Number, Int8>) {
    for (int64_t k = 0; k < size; k += 1 + kBlockWords, x += (2 + kBlockWords) * width) {
      Sixteen<Words> products[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) products[c] = sixteen([&](int) { return Words{} + x[width + c]; });
      add_words<Int8, kFull>(w + (k + 1) * rows, rows, kBlockWords, x + 2 * width, width, products);
      const Sixteen<Words> scale = panel_words<kFull>(w + k * rows, rows);
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        sums[c] += sixteen([&](int i) {
          const Floats both = reinterpret_cast<Floats>(scale.part[i]) * reinterpret_cast<Floats>(Words{} + x[c]);
          return __builtin_convertvector(products[c].part[i], Floats) * both;
        });
      }
    }
  } else {
    add_words<Number, kFull>(w, rows, size, x, width, sums);
  }
  Word turned[kPanel * C];
  transpose(sums, turned);
  const auto *found = reinterpret_cast<const float *>(turned);
  for (int64_t i = 0; i < rows; ++i, y += width, found += C) {
    for (int c = 0; c < C; ++c) y[c] = add ? y[c] + found[c] : found[c];
  }
}

// Like `multiply_panel`, for any number of rows and all columns. w: rows of floats, or the start of a panel.
template <typename Number>
void multiply(const Word *w, int64_t rows, int64_t in, const Word *x, int64_t width, bool add, float *y) {
  if constexpr (std::is_same_v<Number, float>) {
    const auto *own = reinterpret_cast<const float *>(w), *columns = reinterpret_cast<const float *>(x);
    register_products(rows, own, in, columns, width, add, y);
  } else {
    const int many = kRegister == kLanes ? 8 : 2;
    for (int64_t i = 0; i < rows; i += kPanel, w += kPanel * WordsOf<Number>::row(in), y += kPanel * width) {
      const int64_t n = std::min(kPanel, rows - i);
      auto go_on = [&](auto columns, int64_t c) {
        const int C = decltype(columns)::value;
        if (n == kPanel) return multiply_panel<Number, true, C>(w, n, in, x + c, width, add, y + c);
        multiply_panel<Number, false, C>(w, n, in, x + c, width, add, y + c);
      };
      int64_t c = 0;
      for (; c + 2 * many <= width; c += 2 * many) go_on(std::integral_constant<int, 2 * many>(), c);
      for (; c < width; c += many) go_on(std::integral_constant<int, many>(), c);
    }
  }
}

}  // namespace

extern "C" {

// Pack a float array [rows, in] into panels.
void pack_bfloat16(const float *from, int64_t rows, int64_t in, int32_t *to) { pack_rows<BFloat16>(from, rows, in, to); }
void pack_int8(const float *from, int64_t rows, int64_t in, int32_t *to) { pack_rows<Int8>(from, rows, in, to); }

// Return the words of a packed row with `in` numbers.
int64_t row_words_bfloat16(int64_t in) { return WordsOf<BFloat16>::row(in); }
int64_t row_words_int8(int64_t in) { return WordsOf<Int8>::row(in); }

}  // extern "C"
