// The rows of a decode step as columns, and products with them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "lanes.h"
#include "low_rank.h"
#include "matrix.h"
#include "team.h"

namespace {

const int64_t kFewRows = 64;    // rows of a weight, in the products of a decode step
const int64_t kPanel = 32;      // columns of such a product

// The rows of a decode step as columns, in panels of kPanel or half as many of them: a weight is taken as it lies in
// products with such, while those of rows and a weight begin with a copy of it. Panels of an array with `size` numbers in
// a row follow each other; each is [size, width], and the last may have columns that are not used.
struct Panels {
  int64_t rows, columns;

  explicit Panels(int64_t rows) : rows(rows), columns((rows + kPanel / 2 - 1) / (kPanel / 2) * (kPanel / 2)) {}

  // body(first, width), of which `used(first, width)` hold a row
  template <typename Body>
  void each(Body body) const {
    for (int64_t i = 0; i < columns; i += kPanel) body(i, std::min(kPanel, columns - i));
  }
  // The same, shared out.
  template <typename Body>
  void share(Body body) const {
    pieces(columns, kPanel, body);
  }
  int64_t used(int64_t first, int64_t width) const { return std::min(width, rows - first); }
};

// panels of the rows row(i) [size]
template <typename Row>
void to_panels(const Panels &panels, int64_t size, const Row &row, float *x) {
  const int64_t near = 16;  // numbers of each row at a time
  panels.share([&](int64_t first, int64_t width) {
    float *panel = x + first * size;
    const int64_t used = panels.used(first, width);
    for (int64_t j = 0; j < size; j += near) {
      const int64_t end = std::min(j + near, size);
      for (int64_t i = 0; i < used; ++i) {
        const float *own = row(first + i);
        for (int64_t c = j; c < end; ++c) panel[c * width + i] = own[c];
      }
      for (int64_t c = j; c < end; ++c) std::fill(panel + c * width + used, panel + (c + 1) * width, 0.0f);
    }
  });
}

// The first `used` columns of a panel [size, width] as rows, which are `stride` apart.
void from_panel(const float *panel, int64_t size, int64_t width, int64_t used, float *rows, int64_t stride) {
  for (int64_t i = 0; i < used; ++i, rows += stride) {
    for (int64_t c = 0; c < size; ++c) rows[c] = panel[c * width + i];
  }
}

// `norm_rows` of panels
void norm_panels(const Panels &panels, const float *x, const float *weight, float eps, float *y, int64_t size) {
  panels.share([&](int64_t first, int64_t width) {
    const float *from = x + first * size;
    float *to = y + first * size, scale[kPanel] = {};
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

// Of several products with the same x: weight [out, in], bias [out] or null, y [rows, out], adapter or null.
struct Product {
  const float *weight, *bias;
  float *y;
  int64_t out;
  const PanelAdapter *adapter = nullptr;
};

// The adapters of maps with the same x, panels [in]. memory: the sum of their ranks for each column.
template <int N>
void inner_panels(const Panels &panels, const float *x, int64_t in, const LowRank (&maps)[N], float *memory,
                  PanelAdapter (&adapters)[N]) {
  std::vector<std::pair<int, int64_t>> parts;
  for (int i = 0; i < N; ++i) {
    adapters[i] = {maps[i], memory};
    memory += panels.columns * maps[i].rank;
    if (maps[i].a) panels.each([&](int64_t first, int64_t) { parts.emplace_back(i, first); });
  }
  pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const int64_t first = parts[part].second, width = std::min(kPanel, panels.columns - first);
    const PanelAdapter &own = adapters[parts[part].first];
    const int64_t rank = own.map.rank;
    gemm('N', 'N', rank, width, in, 1, own.map.a, in, x + first * in, width, 0, own.inner + first * rank, width);
  });
}

// x: panels. The columns of all products are shared out together.
void products(const Panels &panels, const float *x, int64_t in, std::initializer_list<Product> list) {
  std::vector<std::pair<const Product *, int64_t>> parts;
  for (const Product &one : list) {
    for (int64_t j = 0; j < one.out; j += kFewRows) parts.emplace_back(&one, j);
  }
  pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const Product &one = *parts[part].first;
    const int64_t j = parts[part].second, n = std::min(kFewRows, one.out - j);
    float *part_y = scratch(n * kPanel);
    panels.each([&](int64_t first, int64_t width) {
      gemm('N', 'N', n, width, in, 1, one.weight + j * in, in, x + first * in, width, 0, part_y, width);
      if (one.adapter) one.adapter->add(j, n, first, width, part_y, width);
      float *y = one.y + first * one.out + j;
      const int64_t used = panels.used(first, width);
      from_panel(part_y, n, width, used, y, one.out);
      add_bias(one.bias ? one.bias + j : nullptr, y, used, n, one.out);
    });
  });
}

// x [in] and y [out]: panels; to y the product with weight [out, in] and its adapter is added.
void add_product(const Panels &panels, const float *x, int64_t in, const float *weight, const PanelAdapter &adapter, float *y,
                 int64_t out) {
  pieces(out, kFewRows, [&](int64_t j, int64_t n) {
    panels.each([&](int64_t first, int64_t width) {
      float *part_y = y + first * out + j * width;
      gemm('N', 'N', n, width, in, 1, weight + j * in, in, x + first * in, width, 1, part_y, width);
      adapter.add(j, n, first, width, part_y, width);
    });
  });
}

}  // namespace
