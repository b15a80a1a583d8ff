// Factors: the inputs of matrix products, float or bfloat16 numbers. Products accumulate in float.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "names.h"
#include "team.h"
#include "vectors.h"

// Blocks of memory between operator calls: one list for all sources of the library, and none of other libraries.
class __attribute__((visibility("hidden"))) KeptBlocks {
 public:
  struct Block {
    std::unique_ptr<char[]> bytes;
    int64_t size = 0;
  };

  // Takes the block that was given last, or an empty one.
  static Block take() {
    std::lock_guard<std::mutex> lock(mutex());
    if (free().empty()) return {};
    Block last = std::move(free().back());
    free().pop_back();
    return last;
  }
  static void give(Block block) {
    std::lock_guard<std::mutex> lock(mutex());
    free().push_back(std::move(block));
  }

 private:
  static std::mutex &mutex() {
    static std::mutex one;
    return one;
  }
  static std::vector<Block> &free() {
    static auto *blocks = new std::vector<Block>;  // never deleted: threads run until the process ends
    return *blocks;
  }
};

namespace {

// The upper half of a float: sign, exponent, and 7 bits of the fraction. May be stored in memory that held floats.
struct __attribute__((may_alias)) BFloat16 {
  uint16_t bits;
};

// Rounds to the nearest number of the type, ties to even; NaN stays NaN.
template <typename Number>
__attribute__((always_inline)) inline Number rounded(float x) {
  if constexpr (std::is_same_v<Number, float>) {
    return x;
  } else {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    return {static_cast<uint16_t>(bits >> 16)};
  }
}

// One register of floats: as bits, and as the upper halves of the bits.
typedef uint32_t RoundedBits __attribute__((vector_size(4 * kRegister)));
typedef uint16_t RoundedTo __attribute__((vector_size(2 * kRegister)));

// Of a function that a loop calls for each number: a call would take the numbers one at a time, not in registers. Compilers
// decide by themselves what they inline, and a use of the loop elsewhere can change it.
#define INLINE __attribute__((always_inline))

// Sets y[i] = term(i), rounded, for 0 <= i < n. Rounds a whole register at once, which compilers do not do by themselves.
template <typename Number, typename Term>
__attribute__((always_inline)) inline void fill(Number *y, int64_t n, Term term) {
  if constexpr (std::is_same_v<Number, float>) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) y[i] = term(i);
  } else {
    int64_t i = 0;
    for (; i + kRegister <= n; i += kRegister) {
      float terms[kRegister];
#pragma omp simd
      for (int64_t j = 0; j < kRegister; ++j) terms[j] = term(i + j);
      const auto x = load<Floats>(terms);
      auto bits = load<RoundedBits>(terms);
      bits = x != x ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
      store(__builtin_convertvector(bits >> 16, RoundedTo), y + i);
    }
    for (; i < n; ++i) y[i] = rounded<Number>(term(i));
  }
}

// Convert a number of the type to a float.
__attribute__((always_inline)) inline float number(float x) { return x; }
__attribute__((always_inline)) inline float number(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof(y));
  return y;
}

template <typename Number>
void round_numbers(Input x, int64_t count, Number *y) {
  fill(y, count, [=](int64_t i) INLINE { return x[i]; });
}

// Returns the factors of an array: the array itself (float), or a rounded copy in `memory` (bfloat16).
inline Input factors(Input x, int64_t, Input) { return x; }
inline const BFloat16 *factors(Input x, int64_t count, BFloat16 *memory) {
  round_numbers(x, count, memory);
  return memory;
}

// Rows of an array as factors: the array itself, or a bfloat16 copy; pieces of work round their rows while they are cached.
template <typename Number, typename Array = Input>
class FactorRows {
 public:
  FactorRows(Array array, int64_t rows, int64_t width) : array_(array), width_(width) {
    if constexpr (!std::is_same_v<Number, float>) own_.reset(new Number[rows * width]);
  }
  // Returns a pointer to the factors of row `first`.
  auto at(int64_t first) const {
    if constexpr (std::is_same_v<Number, float>) return array_ + first * width_;
    else return own_.get() + first * width_;
  }
  // Rounds `rows` rows of the array from `first` on, and returns a pointer to their factors.
  const Number *round(int64_t first, int64_t rows) const {
    return factors(array_ + first * width_, rows * width_, at(first));
  }

 private:
  Array array_;
  int64_t width_;
  std::unique_ptr<Number[]> own_;
};

// Memory for the factors of one operator call. The process keeps one block for each operator that runs at the same time.
template <typename Number>
class FactorMemory {
 public:
  explicit FactorMemory(int64_t numbers) {
    if (std::is_same_v<Number, float>) return;  // floats are factors already
    own_ = KeptBlocks::take();
    const int64_t size = numbers * sizeof(Number);
    if (own_.size < size) {
      own_.bytes.reset();
      own_.bytes.reset(new char[own_.size = size]);
    }
  }
  ~FactorMemory() {
    if (!std::is_same_v<Number, float>) KeptBlocks::give(std::move(own_));
  }
  FactorMemory(const FactorMemory &) = delete;

  Number *data() const { return reinterpret_cast<Number *>(own_.bytes.get()); }

 private:
  KeptBlocks::Block own_;
};

// Returns the factors of a large array: the array itself (float), or a copy in `memory` that all threads round (bfloat16).
template <typename Number>
const Number *all_factors(Input x, int64_t count, Number *memory) {
  if constexpr (std::is_same_v<Number, float>) {
    return x;
  } else {
    parallel_pieces(count, 1 << 15, [&](int64_t i, int64_t size) { round_numbers(x + i, size, memory + i); });
    return memory;
  }
}

// Calls body(i, array, numbers) for each matrix, or stack of matrices, among a half's weights. i: its member index; numbers: its size.
template <template <typename> class Names, typename Body>
void for_matrices(const Given<Names, Input> &given, Body body) {
  const int members = sizeof(given.arrays) / sizeof(Input);
  Input arrays[members];
  Shape shapes[members];
  int dimensions[members];
  std::memcpy(arrays, &given.arrays, sizeof(arrays));
  std::memcpy(shapes, &given.shapes, sizeof(shapes));
  std::memcpy(dimensions, &given.dimensions, sizeof(dimensions));
  for (int i = 0; i < members; ++i) {
    if (dimensions[i] >= 2) body(i, arrays[i], count(shapes[i], dimensions[i]));
  }
}

template <template <typename> class Names>
int64_t matrix_numbers(const Given<Names, Input> &given) {
  int64_t total = 0;
  for_matrices(given, [&](int, Input, int64_t numbers) { total += numbers; });
  return total;
}

// Returns the factors of a half's matrices: themselves (float), or copies in `memory` (bfloat16; other weights are null).
template <typename Number, template <typename> class Names>
Names<const Number *> matrix_factors(const Given<Names, Input> &given, Number *memory) {
  if constexpr (std::is_same_v<Number, float>) {
    return given.arrays;
  } else {
    const Number *found[sizeof(given.arrays) / sizeof(Input)] = {};
    for_matrices(given, [&](int i, Input array, int64_t numbers) {
      found[i] = all_factors(array, numbers, memory);
      memory += numbers;
    });
    Names<const Number *> all;
    std::memcpy(&all, found, sizeof(found));
    return all;
  }
}

}  // namespace
