// The feed-forward half with experts for new positions of slots.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "column_tiles.h"
#include "decode_halves.h"
#include "factors.h"
#include "lanes.h"
#include "names.h"
#include "team.h"

namespace {

// The number of experts of a token, and whether their shares are divided by their sum.
struct ExpertChoice {
  int64_t count;
  bool normalises;
};

// Where the experts of a step's rows are written: the cache of the routing, int32[slots, layers, size, count]; null: nowhere.
// slots: of each row; null: a row is a slot. places: of each row, in the cache.
struct RoutingRecord {
  int32_t *cache;
  int64_t layers, layer, size;
  const int32_t *slots, *places;

  int32_t *at(int64_t row, int64_t count) const {
    const int64_t slot = slots ? slots[row] : row, place = std::min<int64_t>(std::max(places[row], 0), size - 1);
    return cache + ((slot * layers + layer) * size + place) * count;
  }
};

// An expert's columns are a multiple of this, floats too: most experts have few rows, and processors that compute a wide
// register in halves (Zen 4) multiply eight columns in two thirds of the time of sixteen; others take as long.
const int64_t kExpertColumns = 8;

// The rows of a decode step by expert. Each expert that has some gets columns of its own: tiles of its rows.
struct ExpertColumns {
  struct Own {
    int64_t expert, first;  // first: of its columns, among those of all experts
    ColumnTiles tiles;
    std::vector<int32_t> rows;
  };
  struct Place {
    size_t own;
    int64_t column;  // among the expert's
    float share;
  };
  std::vector<Own> owns;
  std::vector<Place> places;  // [rows, count]
  int64_t columns = 0;

  // shares [rows, experts]: probabilities, which are overwritten.
  ExpertColumns(std::vector<float> &shares, int64_t rows, int64_t experts, const ExpertChoice &choice) {
    std::vector<std::vector<int32_t>> by_expert(experts);
    std::vector<std::pair<int64_t, float>> chosen;  // expert and share
    for (int64_t row = 0; row < rows; ++row) {
      float *own = shares.data() + row * experts, total = 0;
      for (int64_t i = 0; i < choice.count; ++i) {
        const int64_t best = std::max_element(own, own + experts) - own;
        chosen.emplace_back(best, own[best]);
        total += own[best];
        own[best] = -1;
        by_expert[best].push_back(row);
      }
      for (int64_t i = 0; choice.normalises && i < choice.count; ++i) chosen[row * choice.count + i].second /= total;
    }
    std::vector<size_t> numbers(experts);
    for (int64_t e = 0; e < experts; ++e) {
      if (by_expert[e].empty()) continue;
      const ColumnTiles tiles(by_expert[e].size(), kExpertColumns);
      numbers[e] = owns.size();
      owns.push_back({e, columns, tiles, std::move(by_expert[e])});
      columns += tiles.columns;
    }
    std::vector<int64_t> next(experts, 0);
    for (const auto &[expert, share] : chosen) places.push_back({numbers[expert], next[expert]++, share});
  }

  // Writes the experts of all rows, `count` of each.
  void record(const RoutingRecord &to, int64_t count) const {
    const int64_t rows = to.cache ? places.size() / count : 0;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < count; ++i) to.at(row, count)[i] = owns[places[row * count + i].own].expert;
    }
  }
};

// Returns the router's probabilities [rows, experts] for tiles h [hidden].
std::vector<float> expert_shares(Input router, int64_t experts, int64_t hidden, const ColumnTiles &tiles, Input h) {
  std::vector<float> shares(tiles.rows * experts);
  parallel_pieces(experts, 8, [&](int64_t e, int64_t n) {
    tiles.each([&](int64_t first, int64_t width) {
      for (int64_t expert = e; expert < e + n; ++expert) {
        float sums[kTile] = {};
        for (int64_t j = 0; j < hidden; ++j) {
          const float weight = router[expert * hidden + j], *own = h + first * hidden + j * width;
#pragma omp simd
          for (int64_t i = 0; i < width; ++i) sums[i] += weight * own[i];
        }
        for (int64_t i = 0; i < tiles.used(first, width); ++i) shares[(first + i) * experts + expert] = sums[i];
      }
    });
  });
  for (int64_t row = 0; row < tiles.rows; ++row) {
    float *own = shares.data() + row * experts, total = 0;
    const float top = *std::max_element(own, own + experts);
    for (int64_t e = 0; e < experts; ++e) total += own[e] = std::exp(own[e] - top);
    for (int64_t e = 0; e < experts; ++e) own[e] /= total;
  }
  return shares;
}

// Adds the output of the half with experts for tiles x [hidden] to tiles y [hidden], which may be x. memory: as in
// `decode_feed_forward`.
template <typename Number>
class DecodeExperts {
 public:
  DecodeExperts(const LinearMaps<Number> &maps, const DecodeSizes &sizes, const ExpertColumns &columns)
      : maps_(maps), hidden_(sizes.hidden), inner_(sizes.inner), columns_(columns), adapters_(columns.owns.size()) {
    thread_local std::vector<float> memory;
    const int64_t words = words_apart<Number>(hidden_) + words_apart<Number>(inner_);
    const int64_t low = 2 * (rank_memory(MAP_GATE) + rank_memory(MAP_UP) + rank_memory(MAP_DOWN));
    memory.resize(std::max<size_t>(memory.size(), columns.columns * (2 * hidden_ + inner_ + words + low)));
    x_ = memory.data(), act_ = x_ + columns.columns * hidden_, made_ = act_ + columns.columns * inner_;
    low_ = made_ + columns.columns * hidden_;
    Output apart = low_ + columns.columns * low;
    x_words_ = reinterpret_cast<Word *>(kFloats ? x_ : apart);
    act_words_ = reinterpret_cast<Word *>(kFloats ? act_ : apart + columns.columns * words_apart<Number>(hidden_));
    low_size_ = low;
  }

  // Computes all experts; h: tiles of the half's normed input.
  void run(const ColumnTiles &tiles, Input h) {
    parallel_pieces(columns_.owns.size(), 1, [&](int64_t i, int64_t) { prepare(i, tiles, h); });
    over_parts(inner_, kFewRows, [&](int64_t i, int64_t j, int64_t n) { through_gate(i, j, n); });
    if (low_size_) parallel_pieces(columns_.owns.size(), 1, [&](int64_t i, int64_t) { prepare_down(i); });
    over_parts(hidden_, near_rows(inner_), [&](int64_t i, int64_t j, int64_t n) { through_down(i, j, n); });
  }

  // Adds the experts' outputs, times the shares of `count` experts for each row, to tiles y.
  void add(const ColumnTiles &tiles, int64_t count, Output y) const {
    struct Part {
      Input from;
      int64_t step;
      float share;
    };
    tiles.share([&](int64_t first, int64_t width) {
      const int64_t used = tiles.used(first, width);
      std::vector<Part> parts;  // of the tile's rows, `count` of each
      for (int64_t i = first * count; i < (first + used) * count; ++i) {
        const auto &place = columns_.places[i];
        const auto &own = columns_.owns[place.own];
        const ColumnTiles::Place column = own.tiles.place(place.column, hidden_);
        parts.push_back({made_ + own.first * hidden_ + column.first, column.step, place.share});
      }
      Output to = y + first * hidden_;
      for (int64_t c = 0; c < hidden_; ++c, to += width) {
        const Part *part = parts.data();
        for (int64_t i = 0; i < used; ++i) {
          float sum = to[i];
          for (int64_t k = 0; k < count; ++k, ++part) sum += part->share * part->from[c * part->step];
          to[i] = sum;
        }
      }
    });
  }

 private:
  static constexpr bool kFloats = std::is_same_v<Number, float>;  // floats are words already

  const LinearMap<Number> &map(size_t i, int which) const {
    return maps_[columns_.owns[i].expert * FEED_FORWARD_MAPS + which];
  }
  int64_t rank_memory(int which) const {
    const int64_t rank = maps_[which].rank();
    return rank + words_apart<AdapterNumber<Number>>(rank);
  }
  Output low(size_t i) const { return low_ + columns_.owns[i].first * low_size_; }

  // Calls body(i, j, n) for pieces of n of the `size` rows of a map, of all experts; threads share the pieces.
  template <typename Body>
  void over_parts(int64_t size, int64_t most, Body body) const {
    const int64_t each = (size + most - 1) / most;
    parallel_pieces(columns_.owns.size() * each, 1, [&](int64_t part, int64_t) {
      const int64_t j = part % each * most;
      body(part / each, j, std::min(most, size - j));
    });
  }

  // Copies an expert's columns of h.
  void prepare(size_t i, const ColumnTiles &tiles, Input h) {
    const auto &own = columns_.owns[i];
    own.tiles.each([&](int64_t first, int64_t width) {
      Output to = x_ + (own.first + first) * hidden_;
      pick_columns(tiles, h, own.rows.data() + first, own.tiles.used(first, width), hidden_, width, to);
      column_words<Number>(to, hidden_, width, x_words_ + (own.first + first) * WordsOf<Number>::column(hidden_));
    });
    if (low_size_) {
      Output memory = low(i);
      for (int which : {MAP_GATE, MAP_UP}) memory = low_tiles(i, which, x_ + own.first * hidden_, memory);
    }
  }

  void prepare_down(size_t i) {
    Output memory = low(i) + columns_.owns[i].tiles.columns * 2 * (rank_memory(MAP_GATE) + rank_memory(MAP_UP));
    low_tiles(i, MAP_DOWN, act_ + columns_.owns[i].first * inner_, memory);
  }

  // Prepares the adapter of a map for an expert's columns x, as `inner_tiles` does; returns the memory behind its numbers.
  Output low_tiles(size_t i, int which, Input x, Output memory) {
    using Low = AdapterNumber<Number>;
    const LinearMap<Number> &own = map(i, which);
    const ColumnTiles &tiles = columns_.owns[i].tiles;
    const int64_t rank = own.rank(), in = own.in();
    Output inner = memory;
    auto words = reinterpret_cast<Word *>(memory + (std::is_same_v<Low, float> ? 0 : tiles.columns * rank));
    adapters_[i][which] = {&own, words};
    if (!rank) return memory;
    std::vector<float> packed(words_apart<Low>(in) * kTile);
    tiles.each([&](int64_t first, int64_t width) {
      Output part = inner + first * rank;
      Input from = x + first * in;
      column_words<Low>(from, in, width, reinterpret_cast<Word *>(packed.data()));
      auto columns = reinterpret_cast<const Word *>(packed.empty() ? from : packed.data());
      multiply<Low>(own.a.packed, rank, in, columns, width, false, part);
      for (int64_t k = 0; k < rank * width; ++k) part[k] *= own.scale;
      column_words<Low>(part, rank, width, words + first * WordsOf<Low>::column(rank));
    });
    return memory + tiles.columns * 2 * rank_memory(which);
  }

  void through_gate(size_t i, int64_t j, int64_t n) {
    const auto &own = columns_.owns[i];
    Output gate = scratch(2 * n * kTile), up = gate + n * kTile;
    const Word *x = x_words_ + own.first * WordsOf<Number>::column(hidden_);
    own.tiles.each([&](int64_t first, int64_t width) {
      tile_product(map(i, MAP_GATE).weight, j, n, x, first, width, false, gate);
      tile_product(map(i, MAP_UP).weight, j, n, x, first, width, false, up);
      if (low_size_) {
        adapters_[i][MAP_GATE].add(j, n, first, width, gate);
        adapters_[i][MAP_UP].add(j, n, first, width, up);
      }
      const int64_t column = own.first + first;
      Output piece = act_ + column * inner_ + j * width;
      gated(gate, up, piece, n * width);
      column_words<Number>(piece, n, width,
                           act_words_ + column * WordsOf<Number>::column(inner_) + WordsOf<Number>::column(j) * width);
    });
  }

  void through_down(size_t i, int64_t j, int64_t n) {
    const auto &own = columns_.owns[i];
    const Word *x = act_words_ + own.first * WordsOf<Number>::column(inner_);
    own.tiles.each([&](int64_t first, int64_t width) {
      Output part = made_ + (own.first + first) * hidden_ + j * width;
      tile_product(map(i, MAP_DOWN).weight, j, n, x, first, width, false, part);
      if (low_size_) adapters_[i][MAP_DOWN].add(j, n, first, width, part);
    });
  }

  const LinearMaps<Number> &maps_;
  const int64_t hidden_, inner_;
  const ExpertColumns &columns_;
  std::vector<std::array<TileAdapter<Number>, FEED_FORWARD_MAPS>> adapters_;
  Output x_, act_, made_, low_;
  Word *x_words_, *act_words_;
  int64_t low_size_;  // floats of the adapters' memory per column; 0 without adapters
};

template <typename Number>
void decode_experts(const FeedForwardWeights<Input> &w, const LinearMaps<Number> &maps, const DecodeSizes &sizes,
                    float epsilon, const ExpertChoice &choice, const RoutingRecord &record, const ColumnTiles &tiles, Input x,
                    Output y, Output memory) {
  const int64_t experts = (maps.end() - maps.begin()) / FEED_FORWARD_MAPS;
  norm_tiles(tiles, x, w.norm, epsilon, memory, sizes.hidden);
  std::vector<float> shares = expert_shares(w.router, experts, sizes.hidden, tiles, memory);
  const ExpertColumns columns(shares, tiles.rows, experts, choice);
  columns.record(record, choice.count);
  DecodeExperts<Number> all(maps, sizes, columns);
  all.run(tiles, memory);
  all.add(tiles, choice.count, y);
}

struct DecodeExpertInputs {
  Input x;
  const DecodeExpertNumbers *numbers;
  const int32_t *places;
  int32_t *routing;
};

template <typename Number>
int decode_experts_half_of(void **params, int *ndims, int64_t **shapes) {
  const int64_t *cache = shapes[INDEX(DecodeExpertInputs, routing)];
  auto half = [=](const DecodeExpertInputs &in, const auto &weights, const auto &maps, const auto &sizes, const auto &...rest) {
    const auto &numbers = *in.numbers;
    const ExpertChoice choice{numbers.chosen, numbers.normalises != 0};
    const RoutingRecord record{numbers.layer < 0 ? nullptr : in.routing, cache[1], numbers.layer, cache[2], nullptr, in.places};
    decode_experts<Number>(weights, maps, sizes, numbers.epsilon, choice, record, rest...);
  };
  return decode_feed_forward_with<Number, DecodeExpertInputs>(params, ndims, shapes, half);
}

}  // namespace

DECODE_ENTRY_POINTS(decode_experts_half)
