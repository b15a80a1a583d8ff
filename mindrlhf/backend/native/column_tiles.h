// The rows of a decode step as columns, and products with them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "factors.h"
#include "lanes.h"
#include "low_rank.h"
#include "matrix.h"
#include "team.h"

namespace {

const int64_t kFewRows = 64;  // rows of a weight, in the products of a decode step
const int64_t kTile = 32;     // columns of such a product

// The rows of a decode step as columns, in tiles of kTile or half as many of them: a weight is taken as it lies in
// products with such, while those of rows and a weight begin with a copy of it. ColumnTiles of an array with `size` numbers
// in a row follow each other; each is [size, width], and the last may have columns that are not used.
struct ColumnTiles {
  int64_t rows, columns;

  explicit ColumnTiles(int64_t rows) : rows(rows), columns((rows + kTile / 2 - 1) / (kTile / 2) * (kTile / 2)) {}

  // body(first, width), of which `used(first, width)` hold a row
  template <typename Body>
  void each(Body body) const {
    for (int64_t i = 0; i < columns; i += kTile) body(i, std::min(kTile, columns - i));
  }
  // The same, shared out.
  template <typename Body>
  void share(Body body) const {
    parallel_pieces(columns, kTile, body);
  }
  int64_t used(int64_t first, int64_t width) const { return std::min(width, rows - first); }
};

// tiles of the rows row(i) [size]
template <typename Number, typename Row>
void to_tiles(const ColumnTiles &tiles, int64_t size, const Row &row, Number *x) {
  const int64_t near = 16;  // numbers of each row at a time
  tiles.share([&](int64_t first, int64_t width) {
    Number *tile = x + first * size;
    const int64_t used = tiles.used(first, width);
    for (int64_t j = 0; j < size; j += near) {
      const int64_t end = std::min(j + near, size);
      for (int64_t i = 0; i < used; ++i) {
        const float *own = row(first + i);
        for (int64_t c = j; c < end; ++c) tile[c * width + i] = rounded<Number>(own[c]);
      }
      for (int64_t c = j; c < end; ++c) std::fill(tile + c * width + used, tile + (c + 1) * width, Number{});
    }
  });
}

// tiles of some rows of other tiles x [size], which are numbered
void pick_tiles(const ColumnTiles &from, const float *x, const ColumnTiles &tiles, const int32_t *rows, int64_t size,
                float *y) {
  tiles.share([&](int64_t first, int64_t width) {
    float *tile = y + first * size;
    std::fill(tile, tile + size * width, 0.0f);
    for (int64_t i = 0; i < tiles.used(first, width); ++i) {
      const int64_t row = rows[first + i], start = row / kTile * kTile, stride = std::min(kTile, from.columns - start);
      const float *own = x + start * size + row - start;
      for (int64_t c = 0; c < size; ++c) tile[c * width + i] = own[c * stride];
    }
  });
}

// The first `used` columns of a tile [size, width] as rows, which are `stride` apart.
void from_tile(const float *tile, int64_t size, int64_t width, int64_t used, float *rows, int64_t stride) {
  for (int64_t i = 0; i < used; ++i, rows += stride) {
    for (int64_t c = 0; c < size; ++c) rows[c] = tile[c * width + i];
  }
}

// `norm_rows` of tiles
template <typename Number>
void norm_tiles(const ColumnTiles &tiles, const float *x, const float *weight, float eps, Number *y, int64_t size) {
  tiles.share([&](int64_t first, int64_t width) {
    const float *from = x + first * size;
    Number *to = y + first * size;
    float scale[kTile] = {};
    for (int64_t j = 0; j < size; ++j) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) scale[i] += from[j * width + i] * from[j * width + i];
    }
    for (int64_t i = 0; i < width; ++i) scale[i] = 1.0f / std::sqrt(scale[i] / size + eps);
    for (int64_t j = 0; j < size; ++j) {
      fill(to + j * width, width, [&](int64_t i) { return from[j * width + i] * scale[i] * weight[j]; });
    }
  });
}

// Of several products with the same x: weight [out, in], bias [out] or null, y [rows, out], adapter or null.
template <typename Number>
struct Product {
  const Number *weight;
  const float *bias;
  float *y;
  int64_t out;
  const TileAdapter<Number> *adapter = nullptr;
};

// The adapters of maps with the same x, tiles [in]. memory: the sum of their ranks for each column.
template <int N, typename Number>
void inner_tiles(const ColumnTiles &tiles, const Number *x, int64_t in, const LowRank<Number> (&maps)[N], Number *memory,
                 TileAdapter<Number> (&adapters)[N]) {
  std::vector<std::pair<int, int64_t>> parts;
  for (int i = 0; i < N; ++i) {
    adapters[i] = {maps[i], memory};
    memory += tiles.columns * maps[i].rank;
    if (maps[i].a) tiles.each([&](int64_t first, int64_t) { parts.emplace_back(i, first); });
  }
  parallel_pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const int64_t first = parts[part].second, width = std::min(kTile, tiles.columns - first);
    const TileAdapter<Number> &own = adapters[parts[part].first];
    const int64_t rank = own.map.rank;
    float *inner = scratch(rank * width);
    gemm('N', 'N', rank, width, in, 1, own.map.a, in, x + first * in, width, 0, inner, width);
    round_numbers(inner, rank * width, own.inner + first * rank);
  });
}

// x: tiles. The columns of all products are shared out together.
template <typename Number>
void products(const ColumnTiles &tiles, const Number *x, int64_t in, std::initializer_list<Product<Number>> list) {
  std::vector<std::pair<const Product<Number> *, int64_t>> parts;
  for (const Product<Number> &one : list) {
    for (int64_t j = 0; j < one.out; j += kFewRows) parts.emplace_back(&one, j);
  }
  parallel_pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const Product<Number> &one = *parts[part].first;
    const int64_t j = parts[part].second, n = std::min(kFewRows, one.out - j);
    float *part_y = scratch(n * kTile);
    tiles.each([&](int64_t first, int64_t width) {
      gemm('N', 'N', n, width, in, 1, one.weight + j * in, in, x + first * in, width, 0, part_y, width);
      if (one.adapter) one.adapter->add(j, n, first, width, part_y, width);
      float *y = one.y + first * one.out + j;
      const int64_t used = tiles.used(first, width);
      from_tile(part_y, n, width, used, y, one.out);
      add_bias(one.bias ? one.bias + j : nullptr, y, used, n, one.out);
    });
  });
}

// x [in] and y [out]: tiles; to y the product with weight [out, in] and its adapter is added.
template <typename Number>
void add_product(const ColumnTiles &tiles, const Number *x, int64_t in, const Number *weight,
                 const TileAdapter<Number> &adapter, float *y, int64_t out) {
  parallel_pieces(out, kFewRows, [&](int64_t j, int64_t n) {
    tiles.each([&](int64_t first, int64_t width) {
      float *part_y = y + first * out + j * width;
      gemm('N', 'N', n, width, in, 1, weight + j * in, in, x + first * in, width, 1, part_y, width);
      adapter.add(j, n, first, width, part_y, width);
    });
  });
}

}  // namespace
