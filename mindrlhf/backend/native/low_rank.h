// Adapters of linear maps: they add scale * B A to a weight W [out, in], with A [rank, in] and B [out, rank].

#pragma once

#include <cstdint>
#include <vector>

#include "factors.h"
#include "matrix.h"
#include "names.h"

namespace {

// The adapter of a map. Without an adapter a and b are null, and rank is 0.
template <typename Number>
struct LowRank {
  const Number *a = nullptr, *b = nullptr;
  float scale = 0;
  int64_t rank = 0;

  // Adds the adapter's product with x [m, in] to y [m, out]. inner: memory for [2, m, rank].
  void add(const Number *x, int64_t m, int64_t in, Output y, int64_t out, Output inner) const {
    if (!a) return;
    gemm_rows('T', m, rank, in, scale, x, in, a, in, 0, inner, rank);
    const Number *own = factors(inner, m * rank, reinterpret_cast<Number *>(inner + m * rank));
    gemm_rows('T', m, out, rank, 1, own, rank, b, rank, 1, y, out);
  }
};

template <typename Number>
struct AttentionAdapters {
  LowRank<Number> q, k, v, o;

  int64_t rank() const { return q.rank + k.rank + v.rank + o.rank; }
};

template <typename Number>
struct FeedForwardAdapters {
  LowRank<Number> gate, up, down;

  int64_t rank() const { return gate.rank + up.rank + down.rank; }
};

template <typename Number>
LowRank<Number> adapter_of(const Number *a, const Number *b, Shape shape, Input scales, int index) {
  return a ? LowRank<Number>{a, b, scales[index], shape[0]} : LowRank<Number>{};
}

// Return the adapters of a half. w: the weights of `given` as factors.
template <typename Number>
AttentionAdapters<Number> adapters_of(const Given<AttentionWeights, Input> &given,
                                      const AttentionWeights<const Number *> &w) {
  const auto &s = given.shapes;
  const Input scales = given.arrays.scales;
  const bool joined = !given.arrays.wk;  // wk and wv are parts of wq, see `parted`
  return {adapter_of(w.wq_a, w.wq_b, s.wq_a, scales, 0),
          adapter_of(w.wk_a, w.wk_b, joined ? s.wq_a : s.wk_a, scales, joined ? 0 : 1),
          adapter_of(w.wv_a, w.wv_b, joined ? s.wq_a : s.wv_a, scales, joined ? 0 : 2),
          adapter_of(w.wo_a, w.wo_b, s.wo_a, scales, 3)};
}

template <typename Number>
FeedForwardAdapters<Number> adapters_of(const Given<FeedForwardWeights, Input> &given,
                                        const FeedForwardWeights<const Number *> &w) {
  const auto &s = given.shapes;
  const Input scales = given.arrays.scales;
  return {adapter_of(w.w1_a, w.w1_b, s.w1_a, scales, 0), adapter_of(w.w3_a, w.w3_b, s.w3_a, scales, 1),
          adapter_of(w.w2_a, w.w2_b, s.w2_a, scales, 2)};
}

// The gradient of an adapter. Rows are processed piece by piece; the products over all rows follow at the end.
template <typename Number>
class LowRankGradient {
 public:
  LowRankGradient(const LowRank<Number> &map, int64_t rows)
      : map_(map), rows_(rows), inner_(rows * map.rank), slope_(rows * map.rank),
        inner_factors_(inner_.data(), rows, map.rank), slope_factors_(slope_.data(), rows, map.rank) {}

  // Processes columns `begin` to `begin + size` of `in` columns of x, for m rows from `first` on; rows are `stride` apart.
  void input(int64_t first, int64_t m, const Number *x, int64_t stride, int64_t begin, int64_t size, int64_t in) {
    if (!map_.a) return;
    gemm_rows('T', m, map_.rank, size, map_.scale, x, stride, map_.a + begin, in, begin > 0, at(inner_, first),
              map_.rank);
  }

  // Processes columns of dy in the same way.
  void output(int64_t first, int64_t m, const Number *dy, int64_t stride, int64_t begin, int64_t size) {
    if (!map_.a) return;
    const Number *b = map_.b + begin * map_.rank;
    gemm_rows('N', m, map_.rank, size, map_.scale, dy, stride, b, map_.rank, begin > 0, at(slope_, first), map_.rank);
  }

  // Adds the gradient to columns of dx, after all columns of dy have been processed.
  void add(int64_t first, int64_t m, Output dx, int64_t stride, int64_t begin, int64_t size, int64_t in) {
    if (!map_.a) return;
    const Number *slope = slope_factors_.round(first, m);
    gemm_rows('N', m, size, map_.rank, 1, slope, map_.rank, map_.a + begin, in, 1, dx, stride);
  }

  // Return the gradients of a and b, from all rows of x [rows, in] and dy [rows, out], after all calls of `add`.
  WeightGradient<Number> of_a(const Number *x, int64_t in, Output target) const {
    return {rows_, slope_factors_.at(0), x, target, map_.rank, in};
  }
  WeightGradient<Number> of_b(const Number *dy, int64_t out, Output target) const {
    return {rows_, dy, inner_factors_.round(0, rows_), target, out, map_.rank};
  }

 private:
  Output at(std::vector<float> &rows, int64_t first) const { return rows.data() + first * map_.rank; }

  const LowRank<Number> map_;
  const int64_t rows_;
  std::vector<float> inner_, slope_;
  const FactorRows<Number> inner_factors_, slope_factors_;
};

}  // namespace
