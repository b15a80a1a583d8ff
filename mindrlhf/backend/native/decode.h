// Generation: several tokens of each slot, from the embedding to the draw.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "decode_halves.h"
#include "lanes.h"
#include "low_rank.h"
#include "names.h"
#include "panels.h"
#include "slots.h"
#include "team.h"

namespace {

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

// Of one call. enough: with how many slots going on no further token is begun; own_start: where behind the longest prompt
// a slot keeps what it has of its own.
struct DecodeCall {
  int32_t enough, own_start;
};

// ids .. prefixes int32[B], uniform [B, n], stops int32[s]; see `decode_tokens` in operators.py.
struct DecodeInputs {
  const int32_t *ids, *positions, *remaining, *banned, *leaders, *prefixes;
  const DecodeCall *call;
  Input uniform;
  const int32_t *stops;
  Input embedding, cos, sin, norm, head;
  const DecodeNumbers *numbers;
};

// Of each layer, behind those: caches [B, K, S, d] among its weights.
struct DecodeLayer {
  AttentionWeights<Input> attention;
  Output keys, values;
  FeedForwardWeights<Input> feed_forward;
};

struct DecodeOutputs {
  int32_t *token;
  Output behaviour, policy;
};

// The slots whose turn it is, in rows: what each has to know of them for its next token.
struct DecodeRows {
  std::vector<int32_t> slots, positions, angles, leaders, prefixes;

  // Those of `slots` that are at their token t. positions of the tables of angles: `known`.
  void at_token(const DecodeInputs &in, int64_t t, int64_t known) {
    const size_t count = slots.size();
    positions.resize(count), angles.resize(count), leaders.resize(count), prefixes.resize(count);
    for (size_t i = 0; i < count; ++i) {
      positions[i] = in.positions[slots[i]] + t;
      angles[i] = std::min<int64_t>(positions[i], known - 1);
      leaders[i] = in.leaders[slots[i]], prefixes[i] = in.prefixes[slots[i]];
    }
  }
};

}  // namespace

extern "C" {

// Slots that have ended are left out. Outputs: token int32[B, n], behaviour and policy log-probs [B, n].
int decode_tokens(int nparam, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  const auto in = arrays_at<DecodeInputs>(params, ndims, shapes);
  const auto out = arrays_at<DecodeOutputs>(params, ndims, shapes, nparam - arrays_of<DecodeOutputs>());
  const int first_layer = arrays_of<DecodeInputs>(), each = arrays_of<DecodeLayer>();
  const int layers = (nparam - first_layer - arrays_of<DecodeOutputs>()) / each;
  auto shape = [&](int index) { return shapes[index]; };
  const int64_t slots = shape(INDEX(DecodeInputs, uniform))[0], tokens = shape(INDEX(DecodeInputs, uniform))[1];
  const int64_t vocabulary = shape(INDEX(DecodeInputs, head))[0], hidden = shape(INDEX(DecodeInputs, head))[1];
  const int64_t known = shape(INDEX(DecodeInputs, cos))[0], stop_count = shape(INDEX(DecodeInputs, stops))[0];
  const DecodeNumbers &numbers = *in.numbers;
  std::fill(out.token, out.token + slots * tokens, -1);
  std::fill(out.behaviour, out.behaviour + slots * tokens, 0.0f);
  std::fill(out.policy, out.policy + slots * tokens, 0.0f);

  std::vector<DecodeLayer> layer;
  std::vector<DecodeSizes> sizes;
  std::vector<std::pair<AttentionAdapters, FeedForwardAdapters>> adapters;
  int64_t most = vocabulary;
  for (int i = 0, at = first_layer; i < layers; ++i, at += each) {
    auto rows = [&](int index) { return shapes[at + index][0]; };
    const DecodeLayer &own = layer.emplace_back(arrays_at<DecodeLayer>(params, ndims, shapes, at));
    adapters.emplace_back(adapters_of(own.attention, shapes + at + INDEX(DecodeLayer, attention)),
                          adapters_of(own.feed_forward, shapes + at + INDEX(DecodeLayer, feed_forward)));
    sizes.push_back({hidden, rows(INDEX(DecodeLayer, attention.wq)), rows(INDEX(DecodeLayer, attention.wk)),
                     rows(INDEX(DecodeLayer, feed_forward.w1)),
                     std::max(adapters.back().first.rank(), adapters.back().second.rank())});
    most = std::max(most, sizes.back().memory());
  }
  DecodeRows rows;
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (in.remaining[slot] > 0) rows.slots.push_back(slot);
  }
  std::vector<int32_t> next(in.ids, in.ids + slots);
  thread_local std::vector<float> memory;
  const int64_t columns = Panels(slots).columns;
  memory.resize(columns * (2 * hidden + most));
  Output x = memory.data(), h = x + columns * hidden, rest = h + columns * hidden;
  const size_t enough = std::max(in.call->enough, 0);
  for (int64_t t = 0; t < tokens && !rows.slots.empty() && (t == 0 || rows.slots.size() > enough); ++t) {
    const int64_t count = rows.slots.size();
    const Panels panels(count);
    to_panels(panels, hidden, [&](int64_t row) { return in.embedding + next[rows.slots[row]] * hidden; }, x);
    rows.at_token(in, t, known);
    for (int i = 0; i < layers; ++i) {
      const int64_t *cache = shapes[first_layer + i * each + INDEX(DecodeLayer, keys)];
      const Slots now{count, cache[1], sizes[i].width / sizes[i].key_width, cache[2], cache[3], in.call->own_start,
                      rows.slots.data(), rows.positions.data(), rows.leaders.data(), rows.prefixes.data()};
      decode_attention(layer[i].attention, adapters[i].first, sizes[i], now, {in.cos, in.sin, cache[3], numbers.epsilon},
                       numbers.scale, rows.angles.data(), panels, x, x, layer[i].keys, layer[i].values, rest);
      decode_feed_forward(layer[i].feed_forward, adapters[i].second, sizes[i], numbers.epsilon, panels, x, x, rest);
    }
    norm_panels(panels, x, in.norm, numbers.epsilon, h, hidden);
    products(panels, h, hidden, {{in.head, nullptr, rest, vocabulary}});
    pieces(count, 1, [&](int64_t i, int64_t) {
      const int64_t slot = rows.slots[i], at = slot * tokens + t;
      const Drawn one = draw(rest + i * vocabulary, vocabulary, in.uniform[at], t < in.banned[slot], in.stops, stop_count,
                             numbers.inverse_temperature, numbers.greedy);
      next[slot] = out.token[at] = one.token;
      out.behaviour[at] = one.behaviour, out.policy[at] = one.policy;
    });
    auto ended = [&](int32_t slot) {
      return t + 1 >= in.remaining[slot] || std::find(in.stops, in.stops + stop_count, next[slot]) != in.stops + stop_count;
    };
    rows.slots.erase(std::remove_if(rows.slots.begin(), rows.slots.end(), ended), rows.slots.end());
  }
  return 0;
}

}  // extern "C"
