// The rows of a decode step, stored as columns, and products of weights with them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "decode_maps.h"
#include "lanes.h"
#include "matrix.h"
#include "team.h"
#include "weight_rows.h"

namespace {

const int64_t kFewRows = 64;  // weight rows per piece of a decode step's products
static_assert(kFewRows % kBlock == 0);

// Returns a number of weight rows (`in` numbers each) that stay in the processor's cache while all columns are multiplied.
int64_t near_rows(int64_t in) { return std::clamp<int64_t>((1 << 16) / in / kPanel * kPanel, kPanel, kFewRows); }

// The rows of a decode step as columns, kTile per tile: products with columns use a weight in its stored layout. The tiles
// of an array with `size` numbers per row are stored one after another, each [size, width]. The last tile may be narrower:
// its width is a multiple of `least`, and it may have unused columns.
struct ColumnTiles {
  int64_t rows, columns;

  ColumnTiles(int64_t rows, int64_t least) : rows(rows), columns((rows + least - 1) / least * least) {}

  // Calls body(first, width) for each tile; `used(first, width)` of its columns hold a row.
  template <typename Body>
  void each(Body body) const {
    for (int64_t i = 0; i < columns; i += kTile) body(i, std::min(kTile, columns - i));
  }
  // Like `each`, but threads share the tiles.
  template <typename Body>
  void share(Body body) const {
    parallel_pieces(columns, kTile, body);
  }
  int64_t used(int64_t first, int64_t width) const { return std::min(width, rows - first); }

  // A column's first number in tiles [size], and the distance from each number to the next.
  struct Place {
    int64_t first, step;
  };
  Place place(int64_t column, int64_t size) const {
    const int64_t start = column / kTile * kTile;
    return {start * size + column - start, std::min(kTile, columns - start)};
  }
};

// Converts the rows row(i) [size] to tiles x.
template <typename Row>
void to_tiles(const ColumnTiles &tiles, int64_t size, const Row &row, float *x) {
  const int64_t near = 16;  // numbers of each row per step
  tiles.share([&](int64_t first, int64_t width) {
    float *tile = x + first * size;
    const int64_t used = tiles.used(first, width);
    for (int64_t j = 0; j < size; j += near) {
      const int64_t end = std::min(j + near, size);
      for (int64_t i = 0; i < used; ++i) {
        const float *own = row(first + i);
        for (int64_t c = j; c < end; ++c) tile[c * width + i] = own[c];
      }
      for (int64_t c = j; c < end; ++c) std::fill(tile + c * width + used, tile + (c + 1) * width, 0.0f);
    }
  });
}

// Copies columns picked[0], picked[1], ... of tiles x [size], `used` of them, to a tile [size, width]; the others are zeros.
void pick_columns(const ColumnTiles &from, const float *x, const int32_t *picked, int64_t used, int64_t size, int64_t width,
                  float *tile) {
  const float *own[kTile];
  int64_t step[kTile];
  for (int64_t i = 0; i < used; ++i) {
    const ColumnTiles::Place place = from.place(picked[i], size);
    own[i] = x + place.first, step[i] = place.step;
  }
  for (int64_t c = 0; c < size; ++c, tile += width) {
    for (int64_t i = 0; i < used; ++i) tile[i] = own[i][c * step[i]];
    std::fill(tile + used, tile + width, 0.0f);
  }
}

// Copies rows rows[0], rows[1], ... of tiles x [size] to tiles y.
void pick_tiles(const ColumnTiles &from, const float *x, const ColumnTiles &tiles, const int32_t *rows, int64_t size,
                float *y) {
  tiles.share([&](int64_t first, int64_t width) {
    pick_columns(from, x, rows + first, tiles.used(first, width), size, width, y + first * size);
  });
}

// Converts the first `used` columns of a tile [size, width] to rows that are `stride` apart.
void from_tile(const float *tile, int64_t size, int64_t width, int64_t used, float *rows, int64_t stride) {
  for (int64_t i = 0; i < used; ++i, rows += stride) {
    for (int64_t c = 0; c < size; ++c) rows[c] = tile[c * width + i];
  }
}

// Computes `norm_rows` for tiles x [size].
void norm_tiles(const ColumnTiles &tiles, const float *x, const float *weight, float eps, float *y, int64_t size) {
  tiles.share([&](int64_t first, int64_t width) {
    const float *from = x + first * size;
    float *to = y + first * size;
    float scale[kTile] = {};
    for (int64_t j = 0; j < size; ++j) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) scale[i] += from[j * width + i] * from[j * width + i];
    }
    for (int64_t i = 0; i < width; ++i) scale[i] = 1.0f / std::sqrt(scale[i] / size + eps);
    for (int64_t j = 0; j < size; ++j) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[j * width + i] = from[j * width + i] * scale[i] * weight[j];
    }
  });
}

// Returns the words that a column needs in addition to its `in` floats; 0 if floats are the words.
template <typename Number>
int64_t words_apart(int64_t in) {
  return std::is_same_v<Number, float> ? 0 : WordsOf<Number>::column(in);
}

// Returns the words of tiles x [in]: x itself, or a copy in `memory`. A tile from column c on starts at word c * column(in).
template <typename Number>
const Word *tile_words(const ColumnTiles &tiles, const float *x, int64_t in, float *memory) {
  if constexpr (std::is_same_v<Number, float>) {
    return reinterpret_cast<const Word *>(x);
  } else {
    auto words = reinterpret_cast<Word *>(memory);
    tiles.share([&](int64_t first, int64_t width) {
      column_words<Number>(x + first * in, in, width, words + first * WordsOf<Number>::column(in));
    });
    return words;
  }
}

// Multiplies n rows of a weight, from j on, by `width` columns, from `first` on. Writes to y [n, width], or adds if `add`.
template <typename Number>
void tile_product(const PackedMatrix<Number> &weight, int64_t j, int64_t n, const Word *x, int64_t first, int64_t width,
                  bool add, float *y) {
  multiply<Number>(weight.row(j), n, weight.in, x + first * WordsOf<Number>::column(weight.in), width, add, y);
}

// An adapter in a decode step. `inner_tiles` computes its inner values, scale * A x, before its output: tiles [rank].
template <typename Number>
struct TileAdapter {
  const LinearMap<Number> *map = nullptr;
  const Word *inner = nullptr;

  // Adds the adapter's output rows j to j + n, for `width` columns from `first` on, to y [n, width].
  void add(int64_t j, int64_t n, int64_t first, int64_t width, float *y) const {
    if (map->rank()) tile_product(map->b, j, n, inner, first, width, true, y);
  }
};

// Returns the floats of memory that the adapters of `maps` need per column.
template <typename Number>
int64_t inner_memory(const LinearMaps<Number> &maps) {
  int64_t total = 0;
  for (const LinearMap<Number> &map : maps) total += map.rank() + words_apart<AdapterNumber<Number>>(map.rank());
  return total;
}

// Prepares the adapters of maps with the same input, tiles x [in]. memory: `inner_memory` floats per column.
template <int N, typename Number>
void inner_tiles(const ColumnTiles &tiles, const float *x, const LinearMap<Number> *const (&maps)[N], float *memory,
                 TileAdapter<Number> (&adapters)[N]) {
  using Own = AdapterNumber<Number>;
  for (int i = 0; i < N; ++i) {
    const LinearMap<Number> &map = *maps[i];
    const int64_t rank = map.rank(), in = map.in();
    adapters[i] = {&map, reinterpret_cast<const Word *>(memory)};
    if (!rank) continue;
    float *inner = memory;
    auto words = reinterpret_cast<Word *>(memory + (std::is_same_v<Own, float> ? 0 : tiles.columns * rank));
    adapters[i].inner = words;
    tiles.share([&](int64_t first, int64_t width) {
      float *own = inner + first * rank;
      const float *from = x + first * in;
      std::vector<float> packed(words_apart<Own>(in) * width);
      column_words<Own>(from, in, width, reinterpret_cast<Word *>(packed.data()));
      auto columns = reinterpret_cast<const Word *>(packed.empty() ? from : packed.data());
      multiply<Own>(map.a.packed, rank, in, columns, width, false, own);
      for (int64_t k = 0; k < rank * width; ++k) own[k] *= map.scale;
      column_words<Own>(own, rank, width, words + first * WordsOf<Own>::column(rank));
    });
    memory += tiles.columns * (rank + words_apart<Own>(rank));
  }
}

// One of several products with the same x: map, bias [out] or null, output y [rows, out], adapter or null.
template <typename Number>
struct Product {
  const LinearMap<Number> *map;
  const float *bias;
  float *y;
  const TileAdapter<Number> *adapter;
};

// Computes several products with x, the words of tiles. Threads share the rows of all weights.
template <typename Number>
void products(const ColumnTiles &tiles, const Word *x, std::initializer_list<Product<Number>> list) {
  std::vector<std::pair<const Product<Number> *, int64_t>> parts;
  for (const Product<Number> &one : list) {
    for (int64_t j = 0; j < one.map->out(); j += kFewRows) parts.emplace_back(&one, j);
  }
  parallel_pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const Product<Number> &one = *parts[part].first;
    const int64_t out = one.map->out(), j = parts[part].second, n = std::min(kFewRows, out - j);
    float *part_y = scratch(n * kTile);
    tiles.each([&](int64_t first, int64_t width) {
      tile_product(one.map->weight, j, n, x, first, width, false, part_y);
      if (one.adapter) one.adapter->add(j, n, first, width, part_y);
      float *y = one.y + first * out + j;
      const int64_t used = tiles.used(first, width);
      from_tile(part_y, n, width, used, y, out);
      add_bias(one.bias ? one.bias + j : nullptr, y, used, n, out);
    });
  });
}

// Adds the product of the adapter's map (adapter included) and x, the words of tiles, to tiles y [out].
template <typename Number>
void add_product(const ColumnTiles &tiles, const Word *x, const TileAdapter<Number> &adapter, float *y) {
  const LinearMap<Number> &map = *adapter.map;
  parallel_pieces(map.out(), near_rows(map.in()), [&](int64_t j, int64_t n) {
    tiles.each([&](int64_t first, int64_t width) {
      float *part_y = y + first * map.out() + j * width;
      tile_product(map.weight, j, n, x, first, width, true, part_y);
      adapter.add(j, n, first, width, part_y);
    });
  });
}

}  // namespace
