// Adapters of linear maps: to W [out, in] scale * B A is added, with A [rank, in] and B [out, rank].

#pragma once

#include <cstdint>
#include <vector>

#include "matrix.h"
#include "names.h"

namespace {

// a and b are null, and rank is 0, where a map has no adapter.
struct LowRank {
  Input a = nullptr, b = nullptr;
  float scale = 0;
  int64_t rank = 0;

  // To y [m, out] the adapter's product with x [m, in] is added. inner: memory for [m, rank].
  void add(Input x, int64_t m, int64_t in, Output y, int64_t out, Output inner) const {
    if (!a) return;
    gemm('N', 'T', m, rank, in, scale, x, in, a, in, 0, inner, rank);
    gemm('N', 'T', m, out, rank, 1, inner, rank, b, rank, 1, y, out);
  }
};

struct AttentionAdapters {
  LowRank q, k, v, o;

  int64_t rank() const { return q.rank + k.rank + v.rank + o.rank; }
};

struct FeedForwardAdapters {
  LowRank gate, up, down;

  int64_t rank() const { return gate.rank + up.rank + down.rank; }
};

LowRank adapter_of(Input a, Input b, Shape shape, Input scales, int index) {
  return a ? LowRank{a, b, scales[index], shape[0]} : LowRank{};
}

AttentionAdapters adapters_of(const Given<AttentionWeights, Input> &given) {
  const auto &w = given.arrays;
  const auto &s = given.shapes;
  return {adapter_of(w.wq_a, w.wq_b, s.wq_a, w.scales, 0), adapter_of(w.wk_a, w.wk_b, s.wk_a, w.scales, 1),
          adapter_of(w.wv_a, w.wv_b, s.wv_a, w.scales, 2), adapter_of(w.wo_a, w.wo_b, s.wo_a, w.scales, 3)};
}

FeedForwardAdapters adapters_of(const Given<FeedForwardWeights, Input> &given) {
  const auto &w = given.arrays;
  const auto &s = given.shapes;
  return {adapter_of(w.w1_a, w.w1_b, s.w1_a, w.scales, 0), adapter_of(w.w3_a, w.w3_b, s.w3_a, w.scales, 1),
          adapter_of(w.w2_a, w.w2_b, s.w2_a, w.scales, 2)};
}

// The gradient of an adapter. Rows are worked on as they come by; the products with all of them follow at the end.
class LowRankGradient {
 public:
  LowRankGradient(const LowRank &map, int64_t rows)
      : map_(map), rows_(rows), inner_(rows * map.rank), slope_(rows * map.rank) {}

  // Takes columns `begin` to `begin + size` of x; m rows from `first` on, those of x `stride` apart, of `in` columns.
  void input(int64_t first, int64_t m, Input x, int64_t stride, int64_t begin, int64_t size, int64_t in) {
    if (!map_.a) return;
    gemm('N', 'T', m, map_.rank, size, map_.scale, x, stride, map_.a + begin, in, begin > 0, at(inner_, first), map_.rank);
  }

  // Takes columns of dy, likewise.
  void output(int64_t first, int64_t m, Input dy, int64_t stride, int64_t begin, int64_t size) {
    if (!map_.a) return;
    Input b = map_.b + begin * map_.rank;
    gemm('N', 'N', m, map_.rank, size, map_.scale, dy, stride, b, map_.rank, begin > 0, at(slope_, first), map_.rank);
  }

  // To columns of dx the gradient is added, once all columns of dy have been taken.
  void add(int64_t first, int64_t m, Output dx, int64_t stride, int64_t begin, int64_t size, int64_t in) {
    if (!map_.a) return;
    gemm('N', 'N', m, size, map_.rank, 1, at(slope_, first), map_.rank, map_.a + begin, in, 1, dx, stride);
  }

  // Those of a and b, from all rows of x [rows, in] and dy [rows, out].
  WeightGradient of_a(Input x, int64_t in, Output target) const { return {rows_, slope_.data(), x, target, map_.rank, in}; }
  WeightGradient of_b(Input dy, int64_t out, Output target) const {
    return {rows_, dy, inner_.data(), target, out, map_.rank};
  }

 private:
  Output at(std::vector<float> &rows, int64_t first) const { return rows.data() + first * map_.rank; }

  const LowRank map_;
  const int64_t rows_;
  std::vector<float> inner_, slope_;
};

// An adapter in a decode step: the inner values are put together first, as tiles of `rank` rows.
struct TileAdapter {
  LowRank map;
  Output inner = nullptr;

  // To y [n, width], of rows j to j + n of the map's output, the part is added that belongs to columns `first` and on.
  void add(int64_t j, int64_t n, int64_t first, int64_t width, Output y, int64_t stride) const {
    if (!map.a) return;
    gemm('N', 'N', n, width, map.rank, map.scale, map.b + j * map.rank, map.rank, inner + first * map.rank, width, 1, y,
         stride);
  }
};

}  // namespace
