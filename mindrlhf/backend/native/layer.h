// A whole layer over all rows, and its gradient.

#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention.h"
#include "lanes.h"
#include "matrix.h"
#include "team.h"

namespace {

const int64_t kInner = 192;      // numbers between the products of a feed-forward half, of one block
const int64_t kNearPieces = 3;   // that go through such a block one after another

// What `layer` and `layer_gradient` begin with: x, the weights, and who sees whom. Padding is not computed: between the
// arrays that come in and those that go out, the rows that count lie without gaps.
struct WholeLayer {
  enum { X, NORM, WQ, WK, WV, BQ, BK, BV, WO, FFN, W1, W3, W2, COS, SIN, ASKING, LENGTHS, DIMS, NUMBERS, END };
  const float *const *p;
  Attention attention;
  int64_t rows, near, skip, hidden, width, key_width, inner, heads, key_heads, d;  // near: rows that ask, behind skip
  std::vector<int64_t> given;                       // of each row that counts, which row of x it is
  std::vector<std::pair<int64_t, int64_t>> unused;  // rows of x that do not count: the first, and how many
  int64_t given_skip;                               // of x, the rows before those of y
  float eps;
  bool has_bias;

  WholeLayer(void **params, int64_t **shapes) : p(reinterpret_cast<const float *const *>(params)) {
    const float *numbers = p[NUMBERS];
    hidden = shapes[X][1], width = shapes[WQ][0], key_width = shapes[WK][0], inner = shapes[W1][0];
    attention = attention_from(static_cast<const int32_t *>(params[DIMS]), static_cast<const int32_t *>(params[LENGTHS]),
                               shapes[LENGTHS][0], width, numbers[0], true);
    rows = attention.rows, skip = attention.skip, near = rows - skip, given_skip = shapes[X][0] - shapes[ASKING][1];
    d = attention.d, heads = width / d, key_heads = key_width / d;
    eps = numbers[1], has_bias = numbers[2] > 0;
    const int64_t far = attention.n * attention.p;
    int64_t begin = 0;
    attention.spans([&](const Span &span) {
      for (int64_t i = 0; i < span.size; ++i) given.push_back(begin + i);
      const int64_t room = begin < far ? attention.p : attention.r;
      if (span.size < room) unused.emplace_back(begin + span.size, room - span.size);
      begin += room;
    });
  }

  // Rows first.. of those that count: from an array like x, whose first row is row `begin` of it, or to it.
  void take(const float *array, int64_t begin, int64_t first, int64_t m, float *target) const {
    for (int64_t i = 0; i < m; ++i) {
      const float *row = array + (given[first + i] - begin) * hidden;
      std::copy(row, row + hidden, target + i * hidden);
    }
  }
  void put(const float *source, int64_t first, int64_t m, float *array, int64_t begin) const {
    for (int64_t i = 0; i < m; ++i) {
      std::copy(source + i * hidden, source + (i + 1) * hidden, array + (given[first + i] - begin) * hidden);
    }
  }
  void zero_unused(float *array, int64_t begin) const {
    for (const auto &[first, size] : unused) {
      float *row = array + (first - begin) * hidden;
      if (first >= begin) std::fill(row, row + size * hidden, 0.0f);
    }
  }
};

}  // namespace

extern "C" {

// See `layer` in operators.py. Outputs: y [near, hidden], and what going back needs, without gaps: query, key, value, what
// was attended, the sum before the feed-forward half, gate, up.
int layer(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  using L = WholeLayer;
  const L l(params, shapes);
  auto out = reinterpret_cast<float **>(params) + L::END;
  float *y = out[0], *q = out[1], *k = out[2], *v = out[3], *attended = out[4], *sum = out[5], *gate = out[6], *up = out[7];
  const int64_t hidden = l.hidden, width = l.width, key_width = l.key_width, inner = l.inner, d = l.d;
  pieces(l.rows, even(l.rows, kLayerRows), [&](int64_t first, int64_t m) {
    float *x = scratch(2 * m * hidden), *h = x + m * hidden;
    l.take(l.p[L::X], 0, first, m, x);
    norm_rows(x, l.p[L::NORM], l.eps, h, m, hidden);
    auto linear = [&](int weight, int bias, float *target, int64_t size, int64_t begin) {
      if (begin >= m) return;
      float *own = target + (first + begin) * size;
      gemm('N', 'T', m - begin, size, hidden, 1, h + begin * hidden, hidden, l.p[weight], hidden, 0, own, size);
      add_bias(l.has_bias ? l.p[bias] : nullptr, own, m - begin, size, size);
    };
    const int64_t begin = std::max<int64_t>(l.skip - first, 0);  // the first row that asks
    linear(L::WK, L::BK, k, key_width, 0);
    linear(L::WV, L::BV, v, key_width, 0);
    linear(L::WQ, L::BQ, q - l.skip * width, width, begin);
    for (int64_t i = first; i < first + m; ++i) {
      const float *cos = l.p[L::COS] + l.given[i] * d, *sin = l.p[L::SIN] + l.given[i] * d;
      turn(k + i * key_width, cos, sin, 1, k + i * key_width, l.key_heads, d);
      float *own = q + (i - l.skip) * width;
      if (i >= l.skip) turn(own, cos, sin, 1, own, l.heads, d);
    }
  });
  attend(l.attention, q, k, v, attended);
  l.zero_unused(y, l.given_skip);
  pieces(l.near, even(l.near, kLayerRows), [&](int64_t first, int64_t m) {
    float *h = scratch(m * (hidden + inner)), *act = h + m * hidden;
    float *own = sum + first * hidden, *g = gate + first * inner, *u = up + first * inner;
    l.take(l.p[L::X], 0, l.skip + first, m, own);
    gemm('N', 'T', m, hidden, width, 1, attended + first * width, width, l.p[L::WO], width, 1, own, hidden);
    norm_rows(own, l.p[L::FFN], l.eps, h, m, hidden);
    gemm('N', 'T', m, inner, hidden, 1, h, hidden, l.p[L::W1], hidden, 0, g, inner);
    gemm('N', 'T', m, inner, hidden, 1, h, hidden, l.p[L::W3], hidden, 0, u, inner);
    gated(g, u, act, m * inner);
    std::copy(own, own + m * hidden, h);
    gemm('N', 'T', m, hidden, inner, 1, act, inner, l.p[L::W2], inner, 1, h, hidden);
    l.put(h, l.skip + first, m, y, l.given_skip);
  });
  return 0;
}

// Inputs of `layer`, its outputs but the first, dy [near, hidden], and a buffer for each of the weights, to which their
// gradients are added. Outputs: dx, and memory for what lies between. What was attended, gate and up are overwritten.
int layer_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  using L = WholeLayer;
  const L l(params, shapes);
  auto p = reinterpret_cast<float **>(params);
  enum { Q = L::END, K, V, ATTENDED, SUM, GATE, UP, DY, BUFFERS };
  auto buffer = [&](int weight) { return p[BUFFERS + weight - L::NORM]; };
  float **out = p + BUFFERS + L::W2;  // W2 is the last of the weights, which begin at 1
  float *dx = out[0], *h = out[1], *d_k = out[2], *d_v = out[3], *d_sum = out[4], *act = out[5];
  float *d_gate = p[GATE], *d_up = p[UP], *d_attended = p[ATTENDED];
  float *d_y = dx;  // without gaps; dx is written when it is no longer needed
  const int64_t hidden = l.hidden, width = l.width, key_width = l.key_width, inner = l.inner, d = l.d;
  const int64_t some = even(l.rows, kLayerRows), some_near = even(l.near, kLayerRows);  // rows of a piece
  const int64_t parts = (l.rows + some - 1) / some, near_parts = (l.near + some_near - 1) / some_near;
  std::vector<float> norms(parts * hidden, 0.0f), ffns(near_parts * hidden, 0.0f);

  // The feed-forward half; `h` holds its normed inputs. A block of the weights serves several pieces while it is near.
  const int64_t block = (even(inner, kInner) + kLanes - 1) / kLanes * kLanes;
  pieces(near_parts, std::clamp<int64_t>(near_parts / Team::get().threads(), 1, kNearPieces), [&](int64_t part, int64_t n) {
    const int64_t begin = part * some_near, end = std::min(begin + n * some_near, l.near);
    float *d_h = scratch((end - begin) * hidden + some_near * block), *slope = d_h + (end - begin) * hidden;
    l.take(p[DY], l.given_skip, l.skip + begin, end - begin, d_y + begin * hidden);
    norm_rows(p[SUM] + begin * hidden, p[L::FFN], l.eps, h + begin * hidden, end - begin, hidden);
    for (int64_t j = 0; j < inner; j += block) {
      const int64_t size = std::min(block, inner - j);
      for (int64_t first = begin; first < end; first += some_near) {
        const int64_t m = std::min(some_near, end - first), at = first * inner + j;
        float *gate = d_gate + at, *up = d_up + at, *own = d_h + (first - begin) * hidden;
        gemm('N', 'N', m, size, hidden, 1, d_y + first * hidden, hidden, p[L::W2] + j, inner, 0, slope, size);
        for (int64_t i = 0; i < m; ++i) {
          float *g = gate + i * inner, *u = up + i * inner;
          gated(g, u, act + at + i * inner, size);
          gated_gradient(slope + i * size, g, u, g, u, size);
        }
        gemm('N', 'N', m, hidden, size, 1, gate, inner, p[L::W1] + j * hidden, hidden, j > 0, own, hidden);
        gemm('N', 'N', m, hidden, size, 1, up, inner, p[L::W3] + j * hidden, hidden, 1, own, hidden);
      }
    }
    std::copy(d_y + begin * hidden, d_y + end * hidden, d_sum + begin * hidden);
    for (int64_t first = begin; first < end; first += some_near) {
      const int64_t m = std::min(some_near, end - first), at = first * hidden;
      norm_gradient_rows(d_h + at - begin * hidden, p[SUM] + at, p[L::FFN], l.eps, d_sum + at,
                         ffns.data() + first / some_near * hidden, m, hidden, true);
    }
  });
  weight_gradients({{l.near, d_y, act, buffer(L::W2), hidden, inner},
                    {l.near, d_gate, h, buffer(L::W1), inner, hidden},
                    {l.near, d_up, h, buffer(L::W3), inner, hidden},
                    {l.near, d_sum, p[ATTENDED], buffer(L::WO), hidden, width}},
                   true);

  // Attention.
  pieces(l.near, some_near, [&](int64_t first, int64_t m) {
    gemm('N', 'N', m, width, hidden, 1, d_sum + first * hidden, hidden, p[L::WO], width, 0, d_attended + first * width,
         width);
  });
  float *d_q = act;  // large enough: see `_layer_gradient_shapes`
  attend_gradient(l.attention, p[Q], p[K], p[V], d_attended, d_q, d_k, d_v);
  l.zero_unused(dx, 0);
  pieces(l.rows, some, [&](int64_t first, int64_t m) {
    float *d_h = scratch(3 * m * hidden), *x = d_h + m * hidden, *own = x + m * hidden;
    for (int64_t i = first; i < first + m; ++i) {
      const float *cos = l.p[L::COS] + l.given[i] * d, *sin = l.p[L::SIN] + l.given[i] * d;
      turn(d_k + i * key_width, cos, sin, -1, d_k + i * key_width, l.key_heads, d);
      float *query = d_q + (i - l.skip) * width;
      if (i >= l.skip) turn(query, cos, sin, -1, query, l.heads, d);
    }
    const int64_t begin = std::max<int64_t>(l.skip - first, 0), asking = m - std::min(begin, m);
    l.take(p[L::X], 0, first, m, x);
    norm_rows(x, p[L::NORM], l.eps, h + first * hidden, m, hidden);
    gemm('N', 'N', m, hidden, key_width, 1, d_k + first * key_width, key_width, p[L::WK], hidden, 0, d_h, hidden);
    gemm('N', 'N', m, hidden, key_width, 1, d_v + first * key_width, key_width, p[L::WV], hidden, 1, d_h, hidden);
    std::fill(own, own + m * hidden, 0.0f);
    if (asking) {
      const int64_t at = first + begin - l.skip;
      gemm('N', 'N', asking, hidden, width, 1, d_q + at * width, width, p[L::WQ], hidden, 1, d_h + begin * hidden, hidden);
      std::copy(d_sum + at * hidden, d_sum + (at + asking) * hidden, own + begin * hidden);
    }
    norm_gradient_rows(d_h, x, p[L::NORM], l.eps, own, norms.data() + first / some * hidden, m, hidden, true);
    l.put(own, first, m, dx, 0);
  });
  weight_gradients({{l.near, d_q, h + l.skip * hidden, buffer(L::WQ), width, hidden},
                    {l.rows, d_k, h, buffer(L::WK), key_width, hidden},
                    {l.rows, d_v, h, buffer(L::WV), key_width, hidden}},
                   true);
  if (l.has_bias) {
    add_rows(d_q, l.near, width, buffer(L::BQ));
    add_rows(d_k, l.rows, key_width, buffer(L::BK));
    add_rows(d_v, l.rows, key_width, buffer(L::BV));
  }
  add_rows(norms.data(), parts, hidden, buffer(L::NORM));
  add_rows(ffns.data(), near_parts, hidden, buffer(L::FFN));
  return 0;
}

}  // extern "C"
