// Generation: the layers for one new position of each slot, and what it draws.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "matrix.h"
#include "panels.h"
#include "slots.h"
#include "team.h"

namespace {

// A layer's parameters in the order in which operators take them, its caches, and what all layers share.
struct Layer {
  enum { NORM, WQ, WK, WV, BQ, BK, BV, QN, KN, WO, FFN, W1, W3, W2, WEIGHTS };
  float *const *weights;
  float *keys, *values;
  int64_t hidden, inner, width, key_width;
  float scale, eps;
  bool has_bias, has_norms;

  int64_t scratch_size() const { return hidden + 3 * width + 2 * key_width + inner; }  // of a row
};

// The panels x [hidden] become the layer's output for one new position of each row; the row's angles are those at
// `angles[row]` of the tables cos and sin. memory: scratch_size() for each column.
void decode_rows(const Layer &layer, const Slots &slots, const Panels &panels, const float *cos, const float *sin,
                 const int32_t *angles, float *x, float *memory) {
  float *const *w = layer.weights;
  const int64_t columns = panels.columns, hidden = layer.hidden, inner = layer.inner, d = slots.d;
  const int64_t width = layer.width, key_width = layer.key_width;
  float *h = memory, *q = h + columns * hidden, *attended = q + columns * width, *turned = attended + columns * width;
  float *k = turned + columns * width, *v = k + columns * key_width, *act = v + columns * key_width;
  auto bias = [&](int which) { return layer.has_bias ? w[which] : nullptr; };
  norm_panels(panels, x, w[Layer::NORM], layer.eps, h, hidden);
  products(panels, h, hidden,
           {{w[Layer::WQ], bias(Layer::BQ), q, width},
            {w[Layer::WK], bias(Layer::BK), k, key_width},
            {w[Layer::WV], bias(Layer::BV), v, key_width}});
  auto before = [&](int64_t row, int64_t head) {
    float *own_q = q + row * width + head * slots.queries * d, *own_k = k + row * key_width + head * d;
    if (layer.has_norms) {
      norm_rows(own_q, w[Layer::QN], layer.eps, own_q, slots.queries, d);
      norm_rows(own_k, w[Layer::KN], layer.eps, own_k, 1, d);
    }
    const int64_t at = angles[row] * d;
    turn(own_q, cos + at, sin + at, 1, own_q, slots.queries, d);
    turn(own_k, cos + at, sin + at, 1, own_k, 1, d);
  };
  attend_slots(slots, q, k, v, layer.keys, layer.values, layer.scale, attended, before);
  to_panels(panels, width, [=](int64_t row) { return attended + row * width; }, turned);
  add_product(panels, turned, width, w[Layer::WO], x, hidden);
  norm_panels(panels, x, w[Layer::FFN], layer.eps, h, hidden);
  pieces(inner, kFewRows, [&](int64_t j, int64_t n) {
    float *up = scratch(n * kPanel);
    panels.each([&](int64_t first, int64_t count) {
      float *gate = act + first * inner + j * count;
      const float *own = h + first * hidden;
      gemm('N', 'N', n, count, hidden, 1, w[Layer::W1] + j * hidden, hidden, own, count, 0, gate, count);
      gemm('N', 'N', n, count, hidden, 1, w[Layer::W3] + j * hidden, hidden, own, count, 0, up, count);
      gated(gate, up, gate, n * count);
    });
  });
  add_product(panels, act, inner, w[Layer::W2], x, hidden);
}

struct Drawn {
  int32_t token;
  float behaviour, policy;  // log-probs
};

// One token of `size` logits. stops: tokens that may not come if `banned`.
Drawn draw(const float *logits, int64_t size, float uniform, bool banned, const int32_t *stops, int64_t stop_count,
           float inverse, bool greedy) {
  const int64_t block = 64;
  float *weights = scratch(size);
  for (int64_t j = 0; j < size; ++j) weights[j] = logits[j] * inverse;
  auto for_stops = [&](auto body) {
    for (int64_t s = 0; s < stop_count; ++s) {
      if (stops[s] >= 0 && stops[s] < size) body(stops[s]);
    }
  };
  if (banned) for_stops([&](int32_t id) { weights[id] = -INFINITY; });
  const float top = largest(weights, size);
  std::vector<double> sums;
  sums.reserve((size + block - 1) / block);
  double total = 0;
  for (int64_t first = 0; first < size; first += block) {
    const int64_t end = std::min(first + block, size);
    float *w = weights + first;
    sums.push_back(sum_over(end - first, [=](int64_t j) { return w[j] = w[j] == -INFINITY ? 0.0f : exponential(w[j] - top); }));
    total += sums.back();
  }
  int64_t token = 0;
  if (greedy) {
    while (token + 1 < size && !(weights[token] >= 1.0f)) ++token;
  } else {
    // The first token whose cumulative weight lies above uniform * total; the last that has weight if none does.
    const double target = uniform * total;
    double before = 0;
    size_t at = 0;
    while (at + 1 < sums.size() && before + sums[at] <= target) before += sums[at++];
    token = -1;
    for (int64_t j = at * block; j < size; ++j) {
      if (weights[j] > 0) token = j;
      before += weights[j];
      if (before > target && token >= 0) break;
    }
    for (int64_t j = at * block; token < 0 && j-- > 0;) {
      if (weights[j] > 0) token = j;
    }
    token = std::max<int64_t>(token, 0);  // not a number
  }
  const float below = logits[token] * inverse - top;
  double every = total;
  if (banned) for_stops([&](int32_t id) { every += exponential(logits[id] * inverse - top); });
  return {static_cast<int32_t>(token), greedy ? 0.0f : below - static_cast<float>(std::log(total)),
          below - static_cast<float>(std::log(every))};
}

// Of the arrays from `first` on: a layer's weights, and its caches behind them.
Layer layer_at(void **params, int64_t **shapes, int first, const float *numbers) {
  auto weights = reinterpret_cast<float **>(params) + first;
  return {weights, weights[Layer::WEIGHTS], weights[Layer::WEIGHTS + 1], shapes[first + Layer::WQ][1],
          shapes[first + Layer::W1][0], shapes[first + Layer::WQ][0], shapes[first + Layer::WK][0],
          numbers[0], numbers[1], numbers[2] > 0, numbers[3] > 0};
}

Slots slots_of(const Layer &layer, const int64_t *cache, int64_t base, int64_t rows, const int32_t *slots,
               const int32_t *positions, const int32_t *leaders, const int32_t *prefixes) {
  return {rows, cache[1], layer.width / layer.key_width, cache[2], cache[3], base, slots, positions, leaders, prefixes};
}

}  // namespace

extern "C" {

// slots, rows int32[A], limit int32[1], then n times keys or values of prompts [N, K, P, d], then as many caches
// [B, K, S, d]: the first `limit` positions of row rows[i] of each go into slot slots[i] of its cache -> [1]
int admit(int nparam, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  auto whole = reinterpret_cast<int32_t **>(params);
  const int parts = (nparam - 4) / 2;
  const int64_t count = shapes[0][0], limit = whole[2][0];
  pieces(parts * count, 1, [&](int64_t task, int64_t) {
    const int64_t part = 3 + task / count, slot = whole[0][task % count], row = whole[1][task % count];
    const int64_t *from = shapes[part], *to = shapes[part + parts];
    const int64_t heads = to[1], each = std::min({from[2], to[2], limit}) * to[3];
    for (int64_t head = 0; head < heads; ++head) {
      const float *source = p[part] + (row * heads + head) * from[2] * from[3];
      std::copy(source, source + each, p[part + parts] + (slot * heads + head) * to[2] * to[3]);
    }
  });
  p[nparam - 1][0] = 0;
  return 0;
}

// One layer for one new position of each slot; see `decode_layer` in operators.py for the inputs.
int decode_layer(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  enum { X, COS, SIN, POSITIONS, NUMBERS, WEIGHTS, KEYS = WEIGHTS + Layer::WEIGHTS, OUT = KEYS + 2 };
  const int64_t rows = shapes[X][0];
  const Layer layer = layer_at(params, shapes, WEIGHTS, p[NUMBERS]);
  const Single every(rows);
  const int32_t *number = every.numbered.data(), *positions = static_cast<const int32_t *>(params[POSITIONS]);
  const Panels panels(rows);
  thread_local std::vector<float> memory;
  memory.resize(panels.columns * (layer.hidden + layer.scratch_size()));
  float *x = memory.data();
  to_panels(panels, layer.hidden, [&](int64_t row) { return p[X] + row * layer.hidden; }, x);
  decode_rows(layer, slots_of(layer, shapes[KEYS], 0, rows, number, positions, number, every.zeros.data()), panels, p[COS],
              p[SIN], number, x, x + panels.columns * layer.hidden);
  panels.each([&](int64_t first, int64_t width) {
    for (int64_t i = 0; i < panels.used(first, width); ++i) {
      float *row = p[OUT] + (first + i) * layer.hidden;
      for (int64_t j = 0; j < layer.hidden; ++j) row[j] = x[first * layer.hidden + j * width + i];
    }
  });
  return 0;
}

// Several tokens of each slot; see `decode_tokens` in operators.py for the inputs. Slots that have ended are left out.
int decode_tokens(int nparam, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  auto whole = reinterpret_cast<int32_t **>(params);
  enum { IDS, POSITIONS, REMAINING, BANNED, LEADERS, PREFIXES, ENOUGH, UNIFORM, STOPS, EMBED, COS, SIN, NORM, HEAD, NUMBERS, LAYERS };
  const int each = Layer::WEIGHTS + 2, layers = (nparam - LAYERS - 3) / each;
  const int64_t slots = shapes[UNIFORM][0], tokens = shapes[UNIFORM][1], hidden = shapes[EMBED][1];
  const int64_t vocabulary = shapes[HEAD][0], angles = shapes[COS][0], stop_count = shapes[STOPS][0];
  const float *numbers = p[NUMBERS], eps = numbers[1], inverse = numbers[4];
  const bool greedy = numbers[5] > 0;
  int32_t *drawn = whole[nparam - 3];
  float *behaviour = p[nparam - 2], *policy = p[nparam - 1];
  std::fill(drawn, drawn + slots * tokens, -1);
  std::fill(behaviour, behaviour + slots * tokens, 0.0f);
  std::fill(policy, policy + slots * tokens, 0.0f);

  std::vector<int32_t> rows, next(whole[IDS], whole[IDS] + slots), positions(slots), at(slots);
  std::vector<int32_t> leaders(slots), prefixes(slots);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (whole[REMAINING][slot] > 0) rows.push_back(slot);
  }
  thread_local std::vector<float> memory;
  int64_t most = vocabulary;
  for (int i = 0; i < layers; ++i) {
    most = std::max(most, layer_at(params, shapes, LAYERS + i * each, numbers).scratch_size());
  }
  const int64_t columns = Panels(slots).columns;
  memory.resize(columns * (2 * hidden + most));
  float *x = memory.data(), *h = x + columns * hidden, *rest = h + columns * hidden;
  const size_t enough = std::max(whole[ENOUGH][0], 0);
  const int64_t base = whole[ENOUGH][1];
  for (int64_t t = 0; t < tokens && !rows.empty() && (t == 0 || rows.size() > enough); ++t) {
    const int64_t count = rows.size();
    const Panels panels(count);
    to_panels(panels, hidden, [&](int64_t row) { return p[EMBED] + next[rows[row]] * hidden; }, x);
    for (int64_t i = 0; i < count; ++i) {
      positions[i] = whole[POSITIONS][rows[i]] + t;
      at[i] = std::min<int64_t>(positions[i], angles - 1);
      leaders[i] = whole[LEADERS][rows[i]];
      prefixes[i] = whole[PREFIXES][rows[i]];
    }
    for (int i = 0; i < layers; ++i) {
      const int first = LAYERS + i * each;
      const Layer layer = layer_at(params, shapes, first, numbers);
      const Slots now = slots_of(layer, shapes[first + Layer::WEIGHTS], base, count, rows.data(), positions.data(),
                                 leaders.data(), prefixes.data());
      decode_rows(layer, now, panels, p[COS], p[SIN], at.data(), x, rest);
    }
    norm_panels(panels, x, p[NORM], eps, h, hidden);
    products(panels, h, hidden, {{p[HEAD], nullptr, rest, vocabulary}});
    pieces(count, 1, [&](int64_t i, int64_t) {
      const int64_t slot = rows[i], out = slot * tokens + t;
      const Drawn one = draw(rest + i * vocabulary, vocabulary, p[UNIFORM][out], t < whole[BANNED][slot], whole[STOPS],
                             stop_count, inverse, greedy);
      next[slot] = drawn[out] = one.token;
      behaviour[out] = one.behaviour, policy[out] = one.policy;
    });
    rows.erase(std::remove_if(rows.begin(), rows.end(),
                              [&](int32_t slot) {
                                const int32_t *stops = whole[STOPS];
                                return t + 1 >= whole[REMAINING][slot] ||
                                       std::find(stops, stops + stop_count, next[slot]) != stops + stop_count;
                              }),
               rows.end());
  }
  return 0;
}

}  // extern "C"
