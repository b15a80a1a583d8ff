// The linear maps of a half in a decode step: weights, packed or float, with adapters.

#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "factors.h"
#include "names.h"
#include "weight_rows.h"

namespace {

// Memory for `words` words, taken from the blocks of `FactorMemory`.
class WordMemory {
 public:
  explicit WordMemory(int64_t words) : numbers_(2 * words) {}
  Word *data() const { return reinterpret_cast<Word *>(numbers_.data()); }

 private:
  const FactorMemory<BFloat16> numbers_;
};

// A matrix [rows, in] in words: the array itself if it is `ready`, else packed into memory of `words` words.
template <typename Number>
struct PackedMatrix {
  Input array = nullptr;
  int64_t rows = 0, in = 0, words = 0;
  const Word *packed = nullptr;

  PackedMatrix() = default;
  PackedMatrix(Input array, int64_t rows, int64_t in, bool ready = std::is_same_v<Number, float>)
      : array(array), rows(rows), in(in), words(ready ? 0 : rows * WordsOf<Number>::row(in)) {}

  // Packs the matrix into memory, unless it is ready; returns the memory behind its words.
  Word *pack(Word *memory) {
    packed = words ? memory : reinterpret_cast<const Word *>(array);
    if constexpr (!std::is_same_v<Number, float>) {
      if (words) pack_rows<Number>(array, rows, in, memory);
    }
    return memory + words;
  }
  const Word *row(int64_t i) const { return packed + i * WordsOf<Number>::row(in); }
};

// The type of an adapter's numbers: not int8, which would round away the changes of an update.
template <typename Number>
using AdapterNumber = std::conditional_t<std::is_same_v<Number, Int8>, float, Number>;

// A weight [out, in] and its adapter, scale * B A with A [rank, in] and B [out, rank]; rank is 0 without an adapter.
template <typename Number>
struct LinearMap {
  PackedMatrix<Number> weight;
  PackedMatrix<AdapterNumber<Number>> a, b;
  float scale = 0;

  int64_t in() const { return weight.in; }
  int64_t out() const { return weight.rows; }
  int64_t rank() const { return a.rows; }
};

// The maps of a half, in the order of AttentionMap or FeedForwardMap.
template <typename Number>
class LinearMaps {
 public:
  // Appends a map. weight: packed [out, words of a row] or floats [out, in]. a, b: null without an adapter.
  void add(Input weight, Shape shape, int64_t in, Input a = nullptr, Input b = nullptr, Shape a_shape = nullptr,
           float scale = 0) {
    LinearMap<Number> map;
    map.weight = {weight, shape[0], in, shape[1] == WordsOf<Number>::row(in)};
    if (a) {
      const int64_t rank = a_shape[0];
      map.a = {a, rank, in}, map.b = {b, shape[0], rank}, map.scale = scale;
    }
    maps_.push_back(map);
  }
  // Returns the words that `pack` writes.
  int64_t words() const {
    int64_t total = 0;
    for (const LinearMap<Number> &map : maps_) total += map.weight.words + map.a.words + map.b.words;
    return total;
  }
  void pack(Word *memory) {
    for (LinearMap<Number> &map : maps_) memory = map.b.pack(map.a.pack(map.weight.pack(memory)));
  }
  auto begin() const { return maps_.begin(); }
  auto end() const { return maps_.end(); }
  const LinearMap<Number> &operator[](int i) const { return maps_[i]; }

 private:
  std::vector<LinearMap<Number>> maps_;
};

enum AttentionMap { MAP_Q, MAP_K, MAP_V, MAP_O };
enum FeedForwardMap { MAP_GATE, MAP_UP, MAP_DOWN, FEED_FORWARD_MAPS };

// Returns a map's scale; 0 without adapters.
inline float scale_of(Input scales, int map) { return scales ? scales[map] : 0.0f; }

template <typename Number>
LinearMaps<Number> maps_of(const Given<AttentionWeights, Input> &given, int64_t hidden) {
  const auto &w = given.arrays;
  const auto &s = given.shapes;
  LinearMaps<Number> maps;
  maps.add(w.wq, s.wq, hidden, w.wq_a, w.wq_b, s.wq_a, scale_of(w.scales, MAP_Q));
  maps.add(w.wk, s.wk, hidden, w.wk_a, w.wk_b, s.wk_a, scale_of(w.scales, MAP_K));
  maps.add(w.wv, s.wv, hidden, w.wv_a, w.wv_b, s.wv_a, scale_of(w.scales, MAP_V));
  maps.add(w.wo, s.wo, s.wq[0], w.wo_a, w.wo_b, s.wo_a, scale_of(w.scales, MAP_O));
  return maps;
}

// Returns the inner columns of a feed-forward half, or of one of its experts.
inline int64_t feed_forward_inner(const Given<FeedForwardWeights, Input> &given) {
  return given.shapes.w1[given.arrays.router ? 1 : 0];
}

// Returns one expert's part of an array [experts, ...]; null without the array.
inline Input of_expert(Input all, Shape shape, int64_t expert) {
  return all ? all + expert * shape[1] * shape[2] : nullptr;
}

// With experts: the maps of the first expert, then those of the second, ...
template <typename Number>
LinearMaps<Number> maps_of(const Given<FeedForwardWeights, Input> &given, int64_t hidden) {
  const auto &w = given.arrays;
  const auto &s = given.shapes;
  const int64_t inner = feed_forward_inner(given);
  LinearMaps<Number> maps;
  if (w.router) {
    for (int64_t e = 0; e < s.router[0]; ++e) {
      auto add = [&](Input weight, Shape shape, int64_t in, Input a, Input b, Shape a_shape, Shape b_shape, int map) {
        maps.add(of_expert(weight, shape, e), shape + 1, in, of_expert(a, a_shape, e), of_expert(b, b_shape, e), a_shape + 1,
                 scale_of(w.scales, map));
      };
      add(w.w1, s.w1, hidden, w.w1_a, w.w1_b, s.w1_a, s.w1_b, MAP_GATE);
      add(w.w3, s.w3, hidden, w.w3_a, w.w3_b, s.w3_a, s.w3_b, MAP_UP);
      add(w.w2, s.w2, inner, w.w2_a, w.w2_b, s.w2_a, s.w2_b, MAP_DOWN);
    }
    return maps;
  }
  maps.add(w.w1, s.w1, hidden, w.w1_a, w.w1_b, s.w1_a, scale_of(w.scales, MAP_GATE));
  maps.add(w.w3, s.w3, hidden, w.w3_a, w.w3_b, s.w3_a, scale_of(w.scales, MAP_UP));
  maps.add(w.w2, s.w2, inner, w.w2_a, w.w2_b, s.w2_a, scale_of(w.scales, MAP_DOWN));
  return maps;
}

}  // namespace
