// Weights in a decode step: float, bfloat16 or int8 numbers, and their products with columns.
//
// Both factors are words of 32 bits: one float, two bfloat16 or four int8 numbers that follow each other along the inner
// dimension. Float weights are taken as they lie: a word of a row meets the words of 16 or 32 columns at once. Packed ones lie
// in panels, from which a column's word meets those of 16 rows. Every number of a result has one sum, in the order of the
// inner dimension: it does not depend on the number of rows or columns around it.

#pragma once

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__) || defined(__FMA__)
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

const int64_t kTile = 32;   // columns of a product at most
const int64_t kPanel = 16;  // packed rows side by side: first their first words, then their second ones; the last are fewer
const int64_t kBlock = 64;  // int8 numbers that share a scale
const int64_t kBlockWords = kBlock / 4;

// Columns of a product are multiples of this.
template <typename Number>
constexpr int64_t kLeastColumns = std::is_same_v<Number, float> ? 16 : 8;

// Rows: block after block, each its scale and 64 numbers, 128 added. Columns: each block their scales, -128 times the sums
// of their numbers, and the numbers.
struct Int8 {};

// Words of a row and of a column with `in` numbers. step: a sum and the products of packed rows' words and columns'.
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

// N rows of sixteen words become sixteen rows of N, one behind the other.
template <int N>
__attribute__((always_inline)) inline void transpose(Words (&x)[N]) {
  const Order low{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const Order high{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
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
}

// All rows [rows, in], packed, in panels.
template <typename Number>
void pack_rows(Input from, int64_t rows, int64_t in, Word *to) {
  const int64_t size = WordsOf<Number>::row(in);
  parallel_pieces(rows, kPanel, [&](int64_t first, int64_t n) {
    auto packed = reinterpret_cast<Word *>(scratch(n * size));
    for (int64_t i = 0; i < n; ++i) pack_row<Number>(from + (first + i) * in, in, packed + i * size);
    Word *panel = to + first * size;
    int64_t k = 0;
    for (; n == kPanel && k + kPanel <= size; k += kPanel) {
      Words block[kPanel];
      for (int64_t i = 0; i < kPanel; ++i) block[i] = words(packed + i * size + k);
      transpose(block);
      std::memcpy(panel + k * kPanel, block, sizeof(block));
    }
    for (; k < size; ++k) {
      for (int64_t i = 0; i < n; ++i) panel[k * n + i] = packed[i * size + k];
    }
  });
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
#pragma omp simd
      for (int64_t c = 0; c < width; ++c) {
        const uint32_t low = rounded<BFloat16>(x[c]).bits;
        const uint32_t high = k + 1 < in ? rounded<BFloat16>(x[width + c]).bits : 0;
        to[c] = static_cast<Word>(low | high << 16);
      }
    }
  }
}

typedef float HalfLanes __attribute__((vector_size(32)));

inline Lanes plus_product(Lanes sum, float w, Lanes x) { return sum + w * x; }
// Compilers do not always make one instruction of it here, and two of them have other last bits.
inline HalfLanes plus_product(HalfLanes sum, float w, HalfLanes x) {
#if defined(__FMA__)
  return _mm256_fmadd_ps(_mm256_set1_ps(w), x, sum);
#else
  return sum + w * x;
#endif
}

// y [R, width], V vectors of its columns: is, or for `add` gets added, the product of R rows of floats and the columns of x,
// of `in` numbers each.
template <typename Vector, int R, int V>
void multiply_rows(const float *w, int64_t in, const float *x, int64_t width, bool add, float *y) {
  const int64_t size = sizeof(Vector) / sizeof(float);
  Vector sums[R][V] = {};
  auto go_on = [&](int64_t first, int64_t last) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int64_t k = first; k < last; ++k) {
      Vector columns[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) std::memcpy(&columns[v], x + k * width + v * size, sizeof(Vector));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sums[r][v] = plus_product(sums[r][v], w[r * in + k], columns[v]);
      }
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= in; k += kLanes) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) __builtin_prefetch(w + (R + r) * in + k, 0, 2);  // the rows that come next
    go_on(k, k + kLanes);
  }
  go_on(k, in);
  for (int r = 0; r < R; ++r, y += width) {
    for (int v = 0; v < V; ++v) {
      if (add) {
        Vector kept;
        std::memcpy(&kept, y + v * size, sizeof(Vector));
        sums[r][v] += kept;
      }
      std::memcpy(y + v * size, &sums[r][v], sizeof(Vector));
    }
  }
}

// Words of a panel with `rows` rows.
template <bool kFull>
__attribute__((always_inline)) inline Words panel_words(const Word *w, int64_t rows) {
  if constexpr (kFull) {
    __builtin_prefetch(w + 64 * kPanel, 0, 2);  // seen best: 4 KiB ahead
    return words(w);
  } else {
    Words all{};
    std::memcpy(&all, w, rows * sizeof(Word));
    return all;
  }
}

// To the sums of C columns of x [count, width], the products of a panel's words.
template <typename Number, bool kFull, int C, typename Sum>
__attribute__((always_inline)) inline void add_words(const Word *w, int64_t rows, int64_t count, const Word *x,
                                                     int64_t width, Sum (&sums)[C]) {
#pragma GCC unroll 2
  for (int64_t k = 0; k < count; ++k) {
    const Words row = panel_words<kFull>(w + k * rows, rows);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) sums[c] = WordsOf<Number>::step(sums[c], row, Words{} + x[k * width + c]);
  }
}

// y [rows, width], C of its columns: is, or for `add` gets added, the product of a panel and the columns of x.
template <typename Number, bool kFull, int C>
void multiply_panel(const Word *w, int64_t rows, int64_t in, const Word *x, int64_t width, bool add, float *y) {
  if (kFull) rows = kPanel;
  const int64_t size = WordsOf<Number>::row(in);
  Lanes sums[C] = {};
  if constexpr (std::is_same_v<Number, Int8>) {
    for (int64_t k = 0; k < size; k += 1 + kBlockWords, x += (2 + kBlockWords) * width) {
      Words products[C];
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) products[c] = Words{} + x[width + c];
      add_words<Int8, kFull>(w + (k + 1) * rows, rows, kBlockWords, x + 2 * width, width, products);
      const Lanes scale = reinterpret_cast<Lanes>(panel_words<kFull>(w + k * rows, rows));
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        const Lanes both = scale * reinterpret_cast<Lanes>(Words{} + x[c]);
        sums[c] += __builtin_convertvector(products[c], Lanes) * both;
      }
    }
  } else {
    add_words<Number, kFull>(w, rows, size, x, width, sums);
  }
  Words turned[C];
  std::memcpy(turned, sums, sizeof(sums));
  transpose(turned);
  auto found = reinterpret_cast<const float *>(turned);
  for (int64_t i = 0; i < rows; ++i, y += width, found += C) {
    for (int c = 0; c < C; ++c) y[c] = add ? y[c] + found[c] : found[c];
  }
}

// y [rows, width], likewise, of any number of rows. w: rows of floats, or the first of a panel.
template <typename Number>
void multiply(const Word *w, int64_t rows, int64_t in, const Word *x, int64_t width, bool add, float *y) {
#if defined(__AVX512F__)
  const int many = 8;
#else
  const int many = 2;  // of 16 registers
#endif
  if constexpr (std::is_same_v<Number, float>) {
    const auto *rows_of_w = reinterpret_cast<const float *>(w), *columns = reinterpret_cast<const float *>(x);
    auto go_on = [&](auto vector, auto vectors, int64_t c) {
      using Vector = decltype(vector);
      const int V = decltype(vectors)::value;
      int64_t i = 0;
      for (; i + many <= rows; i += many) {
        multiply_rows<Vector, many, V>(rows_of_w + i * in, in, columns + c, width, add, y + i * width + c);
      }
      for (; i < rows; ++i) {
        multiply_rows<Vector, 1, V>(rows_of_w + i * in, in, columns + c, width, add, y + i * width + c);
      }
    };
    int64_t c = 0;
    for (; c + 2 * kLanes <= width; c += 2 * kLanes) go_on(Lanes{}, std::integral_constant<int, 2>(), c);
    for (; c + kLanes <= width; c += kLanes) go_on(Lanes{}, std::integral_constant<int, 1>(), c);
    if (c < width) go_on(HalfLanes{}, std::integral_constant<int, 1>(), c);
  } else {
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

// A float array [rows, in] as panels of packed numbers.
void pack_bfloat16(const float *from, int64_t rows, int64_t in, int32_t *to) { pack_rows<BFloat16>(from, rows, in, to); }
void pack_int8(const float *from, int64_t rows, int64_t in, int32_t *to) { pack_rows<Int8>(from, rows, in, to); }

// Words of such a row.
int64_t row_words_bfloat16(int64_t in) { return WordsOf<BFloat16>::row(in); }
int64_t row_words_int8(int64_t in) { return WordsOf<Int8>::row(in); }

}  // extern "C"
