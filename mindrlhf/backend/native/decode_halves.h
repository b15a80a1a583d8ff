// The halves of a layer for one new position of each slot, with the columns of `ColumnTiles` for rows.

#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "attention.h"
#include "factors.h"
#include "lanes.h"
#include "low_rank.h"
#include "matrix.h"
#include "names.h"
#include "column_tiles.h"
#include "slots.h"
#include "team.h"

namespace {

// What is put for one row of them in memory while a half is computed. rank: the sum of a half's adapters.
struct DecodeSizes {
  int64_t hidden, width, key_width, inner, rank;

  int64_t memory() const { return hidden + std::max(3 * width + 2 * key_width, inner) + rank; }
};

// Tiles: to y [hidden], which may be x, the attention half's output for x [hidden] is added. keys, values: caches. The
// angles of row i are those of position angles[i]. memory: DecodeSizes::memory() for each column.
template <typename Number>
void decode_attention(const AttentionWeights<Input> &w, const AttentionWeights<const Number *> &f,
                      const AttentionAdapters<Number> &maps, const DecodeSizes &sizes, const Slots &slots, const Heads &heads, float scale, const int32_t *angles, const ColumnTiles &tiles,
                      Input x, Output y, Output keys, Output values, Output memory) {
  const int64_t columns = tiles.columns, hidden = sizes.hidden, width = sizes.width, key_width = sizes.key_width;
  Output q = memory + columns * hidden, attended = q + columns * width, k = attended + 2 * columns * width;
  Output v = k + columns * key_width;
  auto h = reinterpret_cast<Number *>(memory), turned = reinterpret_cast<Number *>(attended + columns * width);
  auto inner = reinterpret_cast<Number *>(v + columns * key_width);
  TileAdapter<Number> near[3], out[1];
  norm_tiles(tiles, x, w.norm, heads.epsilon, h, hidden);
  inner_tiles(tiles, h, hidden, {maps.q, maps.k, maps.v}, inner, near);
  products<Number>(tiles, h, hidden,
                   {{f.wq, w.wq_bias, q, width, near},
                    {f.wk, w.wk_bias, k, key_width, near + 1},
                    {f.wv, w.wv_bias, v, key_width, near + 2}});
  auto before = [&](int64_t row, int64_t head) {
    Output own_q = q + row * width + head * slots.queries * slots.d, own_k = k + row * key_width + head * slots.d;
    heads.prepare(own_q, w.q_norm, angles[row], slots.queries, own_q);
    heads.prepare(own_k, w.k_norm, angles[row], 1, own_k);
  };
  attend_slots(slots, q, k, v, keys, values, scale, attended, before);
  to_tiles(tiles, width, [=](int64_t row) { return attended + row * width; }, turned);
  inner_tiles(tiles, turned, width, {maps.o}, inner, out);
  add_product<Number>(tiles, turned, width, f.wo, out[0], y, hidden);
}

// Tiles: to y [hidden], which may be x, the feed-forward half's output for x [hidden] is added. memory: as above.
template <typename Number>
void decode_feed_forward(const FeedForwardWeights<Input> &w, const FeedForwardWeights<const Number *> &f,
                         const FeedForwardAdapters<Number> &maps, const DecodeSizes &sizes, float epsilon,
                         const ColumnTiles &tiles, Input x, Output y, Output memory) {
  const int64_t hidden = sizes.hidden, inner = sizes.inner;
  auto h = reinterpret_cast<Number *>(memory), act = reinterpret_cast<Number *>(memory + tiles.columns * hidden);
  auto low = reinterpret_cast<Number *>(memory + tiles.columns * (hidden + inner));
  TileAdapter<Number> near[2], down[1];
  norm_tiles(tiles, x, w.norm, epsilon, h, hidden);
  inner_tiles(tiles, h, hidden, {maps.gate, maps.up}, low, near);
  parallel_pieces(inner, kFewRows, [&](int64_t j, int64_t n) {
    Output gate = scratch(2 * n * kTile), up = gate + n * kTile;
    tiles.each([&](int64_t first, int64_t count) {
      const Number *own = h + first * hidden;
      gemm('N', 'N', n, count, hidden, 1, f.w1 + j * hidden, hidden, own, count, 0, gate, count);
      gemm('N', 'N', n, count, hidden, 1, f.w3 + j * hidden, hidden, own, count, 0, up, count);
      near[0].add(j, n, first, count, gate, count);
      near[1].add(j, n, first, count, up, count);
      gated(gate, up, act + first * inner + j * count, n * count);
    });
  });
  inner_tiles(tiles, act, inner, {maps.down}, low, down);
  add_product<Number>(tiles, act, inner, f.w2, down[0], y, hidden);
}

// Rows [rows, hidden] to tiles and, after body(tiles, x, y, memory), y back to rows. residual: y begins as x, else as 0.
template <typename Body>
void in_tiles(Input rows, int64_t count, const DecodeSizes &sizes, bool residual, Output out, Body body) {
  const ColumnTiles tiles(count);
  const int64_t hidden = sizes.hidden, numbers = tiles.columns * hidden;
  thread_local std::vector<float> memory;
  memory.resize(2 * numbers + tiles.columns * sizes.memory());
  Output x = memory.data(), y = residual ? x : x + numbers;
  to_tiles(tiles, hidden, [&](int64_t row) { return rows + row * hidden; }, x);
  if (!residual) std::fill(y, y + numbers, 0.0f);
  body(tiles, x, y, x + 2 * numbers);
  tiles.each([&](int64_t first, int64_t width) {
    from_tile(y + first * hidden, hidden, width, tiles.used(first, width), out + first * hidden, hidden);
  });
}

// Inputs: x [B, hidden], cos, sin [positions, d], positions int32[B], numbers, caches of keys and values [B, K, S, d]
// (written), the weights. Output: y [B, hidden].
template <typename Number>
int decode_attention_half_of(void **params, int *ndims, int64_t **shapes) {
  struct Inputs {
    Input x, cos, sin;
    const int32_t *positions;
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
  const int64_t *cache = shapes[INDEX(Inputs, keys)], rows = shapes[0][0];
  const FactorMemory<Number> factors(matrix_numbers(given));
  const auto matrices = matrix_factors(given, factors.data());
  const AttentionAdapters<Number> maps = adapters_of(given, matrices);
  const DecodeSizes sizes{shapes[0][1], given.shapes.wq[0], given.shapes.wk[0], 0, maps.rank()};
  std::vector<int32_t> numbered(rows), zeros(rows, 0), angles(p.positions, p.positions + rows);
  std::iota(numbered.begin(), numbered.end(), 0);
  for (int32_t &angle : angles) angle = std::min<int32_t>(angle, shapes[INDEX(Inputs, cos)][0] - 1);
  const Slots slots{rows,
                    cache[1],
                    sizes.width / sizes.key_width,
                    cache[2],
                    cache[3],
                    0,
                    numbered.data(),
                    p.positions,
                    numbered.data(),
                    zeros.data()};
  const Heads heads{p.cos, p.sin, cache[3], p.numbers->epsilon};
  in_tiles(p.x, rows, sizes, p.numbers->residual, out.y, [&](const ColumnTiles &tiles, Input x, Output y, Output memory) {
    decode_attention(given.arrays, matrices, maps, sizes, slots, heads, p.numbers->scale, angles.data(), tiles, x, y, p.keys,
                     p.values, memory);
  });
  return 0;
}

// Inputs: x [B, hidden], numbers, the weights. Output: y [B, hidden].
template <typename Number>
int decode_feed_forward_half_of(void **params, int *ndims, int64_t **shapes) {
  struct Inputs {
    Input x;
    const HalfNumbers *numbers;
  };
  struct Outputs {
    Output y;
  };
  Arguments arguments(params, ndims, shapes);
  const auto p = arguments.next<Inputs>();
  const auto given = arguments.next<FeedForwardWeights, Input>(p.numbers->weights);
  const auto out = arguments.next<Outputs>();
  const FactorMemory<Number> factors(matrix_numbers(given));
  const auto matrices = matrix_factors(given, factors.data());
  const FeedForwardAdapters<Number> maps = adapters_of(given, matrices);
  const DecodeSizes sizes{shapes[0][1], 0, 0, given.shapes.w1[0], maps.rank()};
  in_tiles(p.x, shapes[0][0], sizes, p.numbers->residual, out.y,
           [&](const ColumnTiles &tiles, Input x, Output y, Output memory) {
             decode_feed_forward(given.arrays, matrices, maps, sizes, p.numbers->epsilon, tiles, x, y, memory);
           });
  return 0;
}

}  // namespace

ENTRY_POINTS(decode_attention_half)
ENTRY_POINTS(decode_feed_forward_half)
