// The rows of a decode step as columns, and products with them.

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

const int64_t kFewRows = 64;  // rows of a weight, in the products of a decode step
static_assert(kFewRows % kBlock == 0);

// Rows of a weight with `in` numbers each, few enough to stay near while all columns are multiplied.
int64_t near_rows(int64_t in) { return std::clamp<int64_t>((1 << 16) / in / kPanel * kPanel, kPanel, kFewRows); }

// The rows of a decode step as columns, in tiles of kTile of them: a weight is taken as it lies in products with such.
// Tiles of an array with `size` numbers in a row follow each other; each is [size, width]. The last may be narrower, a
// multiple of `least`, and have columns that are not used.
struct ColumnTiles {
  int64_t rows, columns;

  ColumnTiles(int64_t rows, int64_t least) : rows(rows), columns((rows + least - 1) / least * least) {}

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
template <typename Row>
void to_tiles(const ColumnTiles &tiles, int64_t size, const Row &row, float *x) {
  const int64_t near = 16;  // numbers of each row at a time
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

// Words of a column alongside its float numbers, which may be words themselves.
template <typename Number>
int64_t words_apart(int64_t in) {
  return std::is_same_v<Number, float> ? 0 : WordsOf<Number>::column(in);
}

// The words of tiles x [in]: x itself, or in `memory`. Those of a tile begin where those of its first column do.
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

// y [n, width] is, or for `add` gets added, the product of a weight's rows from j on and the columns from `first` on.
template <typename Number>
void tile_product(const PackedMatrix<Number> &weight, int64_t j, int64_t n, const Word *x, int64_t first, int64_t width,
                  bool add, float *y) {
  multiply<Number>(weight.row(j), n, weight.in, x + first * WordsOf<Number>::column(weight.in), width, add, y);
}

// An adapter in a decode step: the inner values are put together first, as tiles of `rank` rows.
template <typename Number>
struct TileAdapter {
  const LinearMap<Number> *map = nullptr;
  const Word *inner = nullptr;

  // To y [n, width], of rows j to j + n of the map's output, the part is added that belongs to columns `first` and on.
  void add(int64_t j, int64_t n, int64_t first, int64_t width, float *y) const {
    if (map->rank()) tile_product(map->b, j, n, inner, first, width, true, y);
  }
};

// Float numbers of memory for a column of an adapter.
template <typename Number>
int64_t inner_memory(const LinearMaps<Number> &maps) {
  int64_t total = 0;
  for (const LinearMap<Number> &map : maps) total += map.rank() + words_apart<AdapterNumber<Number>>(map.rank());
  return total;
}

// The adapters of maps with the same x, tiles [in]. memory: `inner_memory` for each column.
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

// Of several products with the same x: the map, its bias [out] or null, y [rows, out], its adapter.
template <typename Number>
struct Product {
  const LinearMap<Number> *map;
  const float *bias;
  float *y;
  const TileAdapter<Number> *adapter;
};

// x: words of tiles. The rows of all weights are shared out together.
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

// x: words of tiles; to the tiles y [out] the map's product is added.
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
