// The halves of a layer for new positions of slots, whose rows are the columns of `ColumnTiles`.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention.h"
#include "factors.h"
#include "lanes.h"
#include "matrix.h"
#include "names.h"
#include "column_tiles.h"
#include "slots.h"
#include "team.h"

namespace {

// The sizes of a layer's arrays, and the floats of memory per column to compute a half. adapters: see `inner_memory`.
struct DecodeSizes {
  int64_t hidden, width, key_width, inner, adapters;

  template <typename Number>
  int64_t memory() const {
    const int64_t words = words_apart<Number>(hidden) + std::max(words_apart<Number>(width), words_apart<Number>(inner));
    return hidden + std::max(3 * width + 2 * key_width, inner) + adapters + words;
  }
};

// Caches of keys and values: [B, K, S, d], or, if `rounded`, int32[B, K, S, d / 2] with two bfloat16 numbers per word.
struct CacheArrays {
  Output keys, values;
  bool rounded;
};

// Adds the attention half's output for tiles x [hidden] to tiles y [hidden], which may be x. Row i is rotated to position
// angles[i]. memory: DecodeSizes::memory() floats per column.
template <typename Number>
void decode_attention(const AttentionWeights<Input> &w, const LinearMaps<Number> &maps, const DecodeSizes &sizes,
                      const Slots &slots, const Heads &heads, float scale, const int32_t *angles,
                      const ColumnTiles &tiles, Input x, Output y, const CacheArrays &caches, Output memory) {
  const int64_t columns = tiles.columns, hidden = sizes.hidden, width = sizes.width, key_width = sizes.key_width;
  Output h = memory, q = h + columns * hidden, attended = q + columns * width, turned = attended + columns * width;
  Output k = turned + columns * width, v = k + columns * key_width, inner = v + columns * key_width;
  Output apart = inner + columns * sizes.adapters, apart_too = apart + columns * words_apart<Number>(hidden);
  TileAdapter<Number> near[3], out[1];
  norm_tiles(tiles, x, w.norm, heads.epsilon, h, hidden);
  inner_tiles(tiles, h, {&maps[MAP_Q], &maps[MAP_K], &maps[MAP_V]}, inner, near);
  products<Number>(tiles, tile_words<Number>(tiles, h, hidden, apart),
                   {{&maps[MAP_Q], w.wq_bias, q, near},
                    {&maps[MAP_K], w.wk_bias, k, near + 1},
                    {&maps[MAP_V], w.wv_bias, v, near + 2}});
  auto before = [&](int64_t row, int64_t head) {
    Output own_q = q + row * width + head * slots.queries * slots.d, own_k = k + row * key_width + head * slots.d;
    heads.prepare(own_q, w.q_norm, angles[row], slots.queries, own_q);
    heads.prepare(own_k, w.k_norm, angles[row], 1, own_k);
  };
  auto attend_to = [&](auto cached) {
    using Cached = decltype(cached);
    const Caches<Cached> own{reinterpret_cast<Cached *>(caches.keys), reinterpret_cast<Cached *>(caches.values)};
    attend_slots(slots, q, k, v, own, scale, attended, before);
  };
  caches.rounded ? attend_to(BFloat16{}) : attend_to(float{});
  to_tiles(tiles, width, [=](int64_t row) { return attended + row * width; }, turned);
  inner_tiles(tiles, turned, {&maps[MAP_O]}, inner, out);
  add_product<Number>(tiles, tile_words<Number>(tiles, turned, width, apart_too), out[0], y);
}

// Adds the feed-forward half's output for tiles x [hidden] to tiles y [hidden], which may be x. memory: as above.
template <typename Number>
void decode_feed_forward(const FeedForwardWeights<Input> &w, const LinearMaps<Number> &maps, const DecodeSizes &sizes,
                         float epsilon, const ColumnTiles &tiles, Input x, Output y, Output memory) {
  const int64_t columns = tiles.columns, hidden = sizes.hidden, inner = sizes.inner;
  Output h = memory, act = h + columns * hidden, low = act + columns * inner, apart = low + columns * sizes.adapters;
  Output apart_too = std::is_same_v<Number, float> ? act : apart + columns * words_apart<Number>(hidden);
  auto act_words = reinterpret_cast<Word *>(apart_too);
  TileAdapter<Number> near[2], down[1];
  norm_tiles(tiles, x, w.norm, epsilon, h, hidden);
  inner_tiles(tiles, h, {&maps[MAP_GATE], &maps[MAP_UP]}, low, near);
  const Word *h_words = tile_words<Number>(tiles, h, hidden, apart);
  parallel_pieces(inner, kFewRows, [&](int64_t j, int64_t n) {
    Output gate = scratch(2 * n * kTile), up = gate + n * kTile;
    tiles.each([&](int64_t first, int64_t count) {
      tile_product(maps[MAP_GATE].weight, j, n, h_words, first, count, false, gate);
      tile_product(maps[MAP_UP].weight, j, n, h_words, first, count, false, up);
      near[0].add(j, n, first, count, gate);
      near[1].add(j, n, first, count, up);
      Output piece = act + first * inner + j * count;
      gated(gate, up, piece, n * count);
      const int64_t own = first * WordsOf<Number>::column(inner) + WordsOf<Number>::column(j) * count;
      column_words<Number>(piece, n, count, act_words + own);
    });
  });
  inner_tiles(tiles, act, {&maps[MAP_DOWN]}, low, down);
  add_product<Number>(tiles, act_words, down[0], y);
}

// Calls body(tiles, x, y, memory) with rows [count, hidden] as tiles x; writes y to `out`. residual: y starts as x, else 0.
template <typename Number, typename Body>
void in_tiles(Input rows, int64_t count, const DecodeSizes &sizes, bool residual, Output out, Body body) {
  const ColumnTiles tiles(count, kLeastColumns<Number>);
  const int64_t hidden = sizes.hidden, numbers = tiles.columns * hidden;
  thread_local std::vector<float> memory;
  memory.resize(2 * numbers + tiles.columns * sizes.template memory<Number>());
  Output x = memory.data(), y = residual ? x : x + numbers;
  to_tiles(tiles, hidden, [&](int64_t row) { return rows + row * hidden; }, x);
  if (!residual) std::fill(y, y + numbers, 0.0f);
  body(tiles, x, y, x + 2 * numbers);
  tiles.each([&](int64_t first, int64_t width) {
    from_tile(y + first * hidden, hidden, width, tiles.used(first, width), out + first * hidden, hidden);
  });
}

// Computes the half for one new position of each slot. Inputs: x [B, hidden], cos, sin [positions, d], places in the cache and
// rows of cos and sin int32[B], numbers, caches of keys and values (written; see `CacheArrays`), the weights. Output: y [B, hidden].
template <typename Number>
int decode_attention_half_of(void **params, int *ndims, int64_t **shapes) {
  struct Inputs {
    Input x, cos, sin;
    const int32_t *places, *rows;
    const HalfNumbers *numbers;
    Output keys, values;
  };
  struct Outputs {
    Output y;
  };
  Arguments arguments(params, ndims, shapes);
  const auto p = arguments.next<Inputs>();
  const auto given = arguments.next<AttentionWeights, Input>(p.numbers->weights);
  const auto out = arguments.next<Outputs>();
  const int64_t *cache = shapes[INDEX(Inputs, keys)], rows = shapes[0][0], d = shapes[INDEX(Inputs, cos)][1];
  auto maps = maps_of<Number>(given, shapes[0][1]);
  const WordMemory words(maps.words());
  maps.pack(words.data());
  const DecodeSizes sizes{shapes[0][1], given.shapes.wq[0], given.shapes.wk[0], 0, inner_memory(maps)};
  std::vector<int32_t> numbered(rows), zeros(rows, 0), angles(p.rows, p.rows + rows);
  std::iota(numbered.begin(), numbered.end(), 0);
  for (int32_t &angle : angles) angle = std::min<int32_t>(angle, shapes[INDEX(Inputs, cos)][0] - 1);
  const Slots slots{rows,
                    cache[1],
                    sizes.width / sizes.key_width,
                    cache[2],
                    d,
                    0,
                    numbered.data(),
                    p.places,
                    numbered.data(),
                    zeros.data()};
  const Heads heads{p.cos, p.sin, d, p.numbers->epsilon};
  const CacheArrays caches{p.keys, p.values, cache[3] != d};
  auto run = [&](const ColumnTiles &tiles, Input x, Output y, Output memory) {
    decode_attention<Number>(given.arrays, maps, sizes, slots, heads, p.numbers->scale, angles.data(), tiles, x, y, caches,
                             memory);
  };
  in_tiles<Number>(p.x, rows, sizes, p.numbers->residual, out.y, run);
  return 0;
}

// Returns the floats of memory per column for the adapters of a feed-forward half; experts have memory of their own.
template <typename Number>
int64_t feed_forward_memory(const Given<FeedForwardWeights, Input> &given, const LinearMaps<Number> &maps) {
  return given.arrays.router ? 0 : inner_memory(maps);
}

// Computes a feed-forward half for one row of each slot. Inputs: x [B, hidden], numbers, further ones, the weights. Output: y
// [B, hidden]. half(inputs, weights, maps, sizes, tiles, x, y, memory) computes it for tiles.
template <typename Number, typename Inputs, typename Half>
int decode_feed_forward_with(void **params, int *ndims, int64_t **shapes, Half half) {
  struct Outputs {
    Output y;
  };
  Arguments arguments(params, ndims, shapes);
  const auto p = arguments.next<Inputs>();
  const auto given = arguments.next<FeedForwardWeights, Input>(p.numbers->weights);
  const auto out = arguments.next<Outputs>();
  auto maps = maps_of<Number>(given, shapes[0][1]);
  const WordMemory words(maps.words());
  maps.pack(words.data());
  const DecodeSizes sizes{shapes[0][1], 0, 0, feed_forward_inner(given), feed_forward_memory(given, maps)};
  auto run = [&](const ColumnTiles &tiles, Input x, Output y, Output memory) {
    half(p, given.arrays, maps, sizes, tiles, x, y, memory);
  };
  in_tiles<Number>(p.x, shapes[0][0], sizes, p.numbers->residual, out.y, run);
  return 0;
}

struct DecodeFeedForwardInputs {
  Input x;
  const HalfNumbers *numbers;
};

template <typename Number>
int decode_feed_forward_half_of(void **params, int *ndims, int64_t **shapes) {
  auto half = [](const auto &in, const auto &weights, const auto &maps, const auto &sizes, const auto &...rest) {
    decode_feed_forward<Number>(weights, maps, sizes, in.numbers->epsilon, rest...);
  };
  return decode_feed_forward_with<Number, DecodeFeedForwardInputs>(params, ndims, shapes, half);
}

// Computes logits. Inputs: x [B, in], weight [out, in] or packed. Output: logits [B, out].
template <typename Number>
int decode_logits_of(void **params, int *ndims, int64_t **shapes) {
  struct Inputs {
    Input x, weight;
  };
  struct Outputs {
    Output y;
  };
  Arguments arguments(params, ndims, shapes);
  const auto p = arguments.next<Inputs>();
  const auto out = arguments.next<Outputs>();
  const int64_t in = shapes[0][1];
  const ColumnTiles tiles(shapes[0][0], kLeastColumns<Number>);
  LinearMaps<Number> maps;
  maps.add(p.weight, shapes[1], in);
  const WordMemory words(maps.words());
  maps.pack(words.data());
  std::vector<float> memory(tiles.columns * (in + words_apart<Number>(in)));
  to_tiles(tiles, in, [&](int64_t row) { return p.x + row * in; }, memory.data());
  const Word *x = tile_words<Number>(tiles, memory.data(), in, memory.data() + tiles.columns * in);
  products<Number>(tiles, x, {{&maps[0], nullptr, out.y, nullptr}});
  return 0;
}

}  // namespace

DECODE_ENTRY_POINTS(decode_attention_half)
DECODE_ENTRY_POINTS(decode_feed_forward_half)
DECODE_ENTRY_POINTS(decode_logits)
