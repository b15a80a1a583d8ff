// Attention of new positions of slots to the key-value cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "factors.h"
#include "lanes.h"
#include "names.h"
#include "team.h"

namespace {

// Rows of queries and their static cache. heads: K key heads; queries: query heads per key head; size: S positions; d: head
// size; slots, positions: each row's slot and position. A row's first prefixes[row] positions are stored in its leader, the
// slot leaders[row]; rows with the same leader read them together. Its other positions are in its own slot, from `base` on.
struct Slots {
  int64_t rows, heads, queries, size, d, base;
  const int32_t *slots, *positions, *leaders, *prefixes;

  int64_t prefix(int64_t row) const { return std::min<int64_t>(std::max(prefixes[row], 0), base); }
  // Returns the number of positions in the row's own slot, including the new one.
  int64_t own(int64_t row) const {
    return std::min<int64_t>(std::max<int64_t>(positions[row] - prefix(row), 0) + 1, size - base);
  }
  int64_t seen(int64_t row) const { return prefix(row) + own(row); }
};

const int64_t kGroupRows = 8;  // most rows of a group, unless the next rows have the same slot as the last

// The rows sorted by leader, in groups that are computed together. starts: each group's first row, then the end.
struct PromptGroups {
  std::vector<int32_t> rows;
  std::vector<int64_t> starts;

  explicit PromptGroups(const Slots &s) : rows(s.rows) {
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return s.leaders[a] < s.leaders[b]; });
    for (int64_t i = 0; i < s.rows; ++i) {
      const bool near = i && s.leaders[rows[i]] == s.leaders[rows[i - 1]];
      // A row attends to earlier rows of its own slot, so the same group has to write their keys first.
      const bool follows = near && (s.slots[rows[i]] == s.slots[rows[i - 1]] || i - starts.back() < kGroupRows);
      if (!follows) starts.push_back(i);
    }
    starts.push_back(s.rows);
  }
};

// Convert sixteen numbers of a cache, float or bfloat16, to floats.
__attribute__((always_inline)) inline Lanes cached(const float *x) { return lanes(x); }
__attribute__((always_inline)) inline Lanes cached(const BFloat16 *x) {
  return sixteen([=](int i) {
    const auto upper = load<RoundedTo>(x + i * kRegister);
    return reinterpret_cast<Floats>(__builtin_convertvector(upper, RoundedBits) << 16);
  });
}

// Sets weights[t] to the inner product of q and row t of keys, for first <= t < end; d = C * kLanes.
template <int C, typename Cached>
void score_lanes(const float *q, const Cached *keys, int64_t first, int64_t end, float *weights) {
  Lanes own[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) own[c] = lanes(q + c * kLanes);
  auto product = [&](int64_t t) __attribute__((always_inline)) {
    const Cached *key = keys + t * C * kLanes;
    Lanes sums = own[0] * cached(key);
#pragma GCC unroll 8
    for (int c = 1; c < C; ++c) sums += own[c] * cached(key + c * kLanes);
    return sums;
  };
  int64_t t = first;
  for (; t + kLanes <= end; t += kLanes) {
    Lanes products[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) products[i] = product(t + i);
    store(sums_of(products), weights + t);
  }
  for (; t < end; ++t) weights[t] = sum_of(product(t));
}

// Like `score_lanes`, for any d.
template <typename Cached>
void score(const float *q, const Cached *keys, int64_t first, int64_t end, int64_t d, float *weights) {
  if (d == 4 * kLanes) return score_lanes<4>(q, keys, first, end, weights);
  if (d == 8 * kLanes) return score_lanes<8>(q, keys, first, end, weights);
  for (int64_t t = first; t < end; ++t) {
    weights[t] = sum_over(d, [q, key = keys + t * d](int64_t c) INLINE { return q[c] * number(key[c]); });
  }
}

// Adds the sum of weights[t] times row t of values, for first <= t < end, to out [Q, d]. The weights of the Q queries are
// `stride` apart; d = C * kLanes.
template <int Q, int C, typename Cached>
void mix_lanes(const float *weights, int64_t stride, const Cached *values, int64_t first, int64_t end, float *out) {
  const int many = kRegister == kLanes ? C : 4 / Q;  // as many sums as fit into registers
  for (int part = 0; part < C; part += many) {
    Lanes sums[Q][many];
    auto each = [&](auto body) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int c = 0; c < many; ++c) {
#pragma GCC unroll 2
        for (int j = 0; j < Q; ++j) body(j, c, (part + c) * kLanes);
      }
    };
    each([&](int j, int c, int64_t at) __attribute__((always_inline)) { sums[j][c] = lanes(out + j * C * kLanes + at); });
    for (int64_t t = first; t < end; ++t) {
      each([&](int j, int c, int64_t at) __attribute__((always_inline)) {
        sums[j][c] += weights[j * stride + t] * cached(values + t * C * kLanes + at);
      });
    }
    each([&](int j, int c, int64_t at) __attribute__((always_inline)) { store(sums[j][c], out + j * C * kLanes + at); });
  }
}

// Like `mix_lanes`, for any number of queries and any d.
template <typename Cached>
void mix(const float *weights, int64_t stride, const Cached *values, int64_t first, int64_t end, int64_t d, int64_t queries,
         float *out) {
  auto several = [&](auto two, auto one) {
    int64_t j = 0;
    for (; j + 2 <= queries; j += 2) two(weights + j * stride, stride, values, first, end, out + j * d);
    if (j < queries) one(weights + j * stride, stride, values, first, end, out + j * d);
  };
  if (d == 4 * kLanes) return several(mix_lanes<2, 4, Cached>, mix_lanes<1, 4, Cached>);
  if (d == 8 * kLanes) return several(mix_lanes<2, 8, Cached>, mix_lanes<1, 8, Cached>);
  for (int64_t j = 0; j < queries; ++j) {
    for (int64_t t = first; t < end; ++t) {
      const float w = weights[j * stride + t];
      const Cached *v = values + t * d;
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) out[j * d + c] += w * number(v[c]);
    }
  }
}

// Caches of keys and values [B, K, S, d], of float or bfloat16 numbers.
template <typename Cached>
struct Caches {
  Cached *keys, *values;
};

// Writes each row's new key and value to the caches, and computes its attention to all of its positions so far. First calls
// before(row, head) for each row and key head, which may still change queries and keys.
template <typename Cached, typename Before>
void attend_slots(const Slots &s, const float *query, const float *key, const float *value, const Caches<Cached> &caches,
                  float scale, float *output, Before before) {
  const int64_t d = s.d, width = s.heads * s.queries * d, near = 32;  // positions that stay in the L1 cache
  const PromptGroups groups(s);
  parallel_pieces((groups.starts.size() - 1) * s.heads, 1, [&](int64_t task, int64_t) {
    const int64_t group = task / s.heads, head = task % s.heads;
    const int32_t *rows = groups.rows.data() + groups.starts[group];
    const int64_t count = groups.starts[group + 1] - groups.starts[group];
    auto place = [&](int64_t slot) { return (slot * s.heads + head) * s.size * d; };
    const int64_t shared = s.prefix(rows[0]), apart = (s.base - shared) * d;  // rows of one leader have one prompt
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = rows[i], at = (row * s.heads + head) * d;
      const int64_t target = place(s.slots[row]) + (s.base + s.own(row) - 1) * d;
      before(row, head);
      round_numbers(key + at, d, caches.keys + target);
      round_numbers(value + at, d, caches.values + target);
      most = std::max(most, s.seen(row));
    }
    float *weights = scratch(count * s.queries * most);
    auto for_queries = [&](int64_t i, auto body) {
      const int64_t at = rows[i] * width + head * s.queries * d;
      for (int64_t j = 0; j < s.queries; ++j) body(query + at + j * d, weights + (i * s.queries + j) * most);
    };
    auto mixed = [&](int64_t i, const Cached *values, int64_t first, int64_t end) {
      float *out = output + rows[i] * width + head * s.queries * d;
      mix(weights + i * s.queries * most, most, values, first, end, d, s.queries, out);
    };
    const Cached *leader = caches.keys + place(s.leaders[rows[0]]);
    for (int64_t t = 0; t < shared; t += near) {
      for (int64_t i = 0; i < count; ++i) {
        for_queries(i, [&](const float *q, float *w) { score(q, leader, t, std::min(t + near, shared), d, w); });
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t seen = s.seen(rows[i]);
      const Cached *own = caches.keys + place(s.slots[rows[i]]) + apart;
      for_queries(i, [&](const float *q, float *w) {
        score(q, own, shared, seen, d, w);
        for (int64_t t = 0; t < seen; ++t) w[t] *= scale;
        softmax(w, seen);
      });
      float *out = output + rows[i] * width + head * s.queries * d;
      std::fill(out, out + s.queries * d, 0.0f);
    }
    leader = caches.values + place(s.leaders[rows[0]]);
    for (int64_t t = 0; t < shared; t += near) {
      for (int64_t i = 0; i < count; ++i) mixed(i, leader, t, std::min(t + near, shared));
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t seen = s.seen(rows[i]);
      mixed(i, caches.values + place(s.slots[rows[i]]) + apart, shared, seen);
    }
  });
}

}  // namespace

// Copies the first positions of row rows[i] of each array of prompts to slot slots[i] of the array's cache. Inputs: slots,
// rows int32[A]; AdmitNumbers; n arrays of keys or values of prompts [N, K, P, d]; n caches [B, K, S, d], or
// int32[B, K, S, d / 2] of bfloat16 numbers. Output: [1].
ENTRY_POINT(admit) {
  auto p = reinterpret_cast<float **>(params);
  auto rounded = reinterpret_cast<BFloat16 **>(params);
  auto integers = reinterpret_cast<int32_t **>(params);
  const int parts = (nparam - 4) / 2;
  const int64_t count = shapes[0][0], limit = static_cast<const AdmitNumbers *>(params[2])->limit;
  parallel_pieces(parts * count, 1, [&](int64_t task, int64_t) {
    const int64_t part = 3 + task / count, slot = integers[0][task % count], row = integers[1][task % count];
    const int64_t *from = shapes[part], *to = shapes[part + parts];
    const int64_t heads = to[1], d = from[3], each = std::min({from[2], to[2], limit}) * d;
    for (int64_t head = 0; head < heads; ++head) {
      const float *source = p[part] + (row * heads + head) * from[2] * d;
      const int64_t target = (slot * heads + head) * to[2] * d;
      if (to[3] == d) round_numbers(source, each, p[part + parts] + target);
      else round_numbers(source, each, rounded[part + parts] + target);
    }
  });
  p[nparam - 1][0] = 0;
  return 0;
}
