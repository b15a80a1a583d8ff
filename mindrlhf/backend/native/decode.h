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
#include "column_tiles.h"
#include "slots.h"
#include "team.h"

namespace {

struct SampledToken {
  int32_t token;
  float behaviour, policy;  // log-probs
};

// One token of `size` logits. stops: tokens that may not come if `banned`.
SampledToken draw(const float *logits, int64_t size, float uniform, bool banned, const int32_t *stops, int64_t stop_count,
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
    sums.push_back(
        sum_over(end - first, [=](int64_t j) { return w[j] = w[j] == -INFINITY ? 0.0f : exponential(w[j] - top); }));
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

// ids .. prefixes int32[B], context int32[B, n], uniform [B, n], stops int32[s], weights int32[2 * layers]; see
// `decode_tokens` in operators.py.
struct DecodeInputs {
  const int32_t *ids, *positions, *remaining, *banned, *leaders, *prefixes;
  const DecodeCall *call;
  const int32_t *context;
  Input uniform;
  const int32_t *stops;
  Input embedding, cos, sin, norm, head;
  const DecodeNumbers *numbers;
  const int32_t *weights;
};

// Of each layer, behind those, between the weights of its halves: [B, K, S, d].
template <typename Array>
struct DecodeCaches {
  Array keys, values;
};

struct DecodeLayer {
  Given<AttentionWeights, Input> attention;
  Given<DecodeCaches, Output> caches;
  Given<FeedForwardWeights, Input> feed_forward;
  AttentionAdapters attention_adapters;
  FeedForwardAdapters feed_forward_adapters;
  DecodeSizes sizes;

  // The next layer. bits: which weights of its halves are given.
  DecodeLayer(Arguments &arguments, const int32_t *bits, int64_t hidden)
      : attention(arguments.next<AttentionWeights, Input>(bits[0])),
        caches(arguments.next<DecodeCaches, Output>(3)),
        feed_forward(arguments.next<FeedForwardWeights, Input>(bits[1])),
        attention_adapters(adapters_of(attention)),
        feed_forward_adapters(adapters_of(feed_forward)),
        sizes{hidden, attention.shapes.wq[0], attention.shapes.wk[0], feed_forward.shapes.w1[0],
              std::max(attention_adapters.rank(), feed_forward_adapters.rank())} {}
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

// Slots that have ended are left out. Tokens of the context are taken as they are: they are not drawn, and end nothing.
// Outputs: token int32[B, n], behaviour and policy log-probs [B, n], 0 where a token was not drawn.
int decode_tokens(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  Arguments arguments(params, shapes);
  const auto in = arguments.next<DecodeInputs>();
  const int64_t slots = shapes[INDEX(DecodeInputs, uniform)][0], tokens = shapes[INDEX(DecodeInputs, uniform)][1];
  const int64_t vocabulary = shapes[INDEX(DecodeInputs, head)][0], hidden = shapes[INDEX(DecodeInputs, head)][1];
  const int64_t known = shapes[INDEX(DecodeInputs, cos)][0], stop_count = shapes[INDEX(DecodeInputs, stops)][0];
  const DecodeNumbers &numbers = *in.numbers;
  std::vector<DecodeLayer> layers;
  int64_t most = vocabulary;
  for (int64_t i = 0; i < shapes[INDEX(DecodeInputs, weights)][0]; i += 2) {
    most = std::max(most, layers.emplace_back(arguments, in.weights + i, hidden).sizes.memory());
  }
  const auto out = arguments.next<DecodeOutputs>();
  std::fill(out.token, out.token + slots * tokens, -1);
  std::fill(out.behaviour, out.behaviour + slots * tokens, 0.0f);
  std::fill(out.policy, out.policy + slots * tokens, 0.0f);

  DecodeRows rows;
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (in.remaining[slot] > 0) rows.slots.push_back(slot);
  }
  std::vector<int32_t> next(in.ids, in.ids + slots);
  thread_local std::vector<float> memory;
  const int64_t columns = ColumnTiles(slots).columns;
  memory.resize(columns * (2 * hidden + most));
  Output x = memory.data(), h = x + columns * hidden, rest = h + columns * hidden;
  const size_t enough = std::max(in.call->enough, 0);
  for (int64_t t = 0; t < tokens && !rows.slots.empty() && (t == 0 || rows.slots.size() > enough); ++t) {
    const int64_t count = rows.slots.size();
    const ColumnTiles tiles(count);
    to_tiles(tiles, hidden, [&](int64_t row) { return in.embedding + next[rows.slots[row]] * hidden; }, x);
    rows.at_token(in, t, known);
    for (const DecodeLayer &layer : layers) {
      const DecodeSizes &sizes = layer.sizes;
      Shape cache = layer.caches.shapes.keys;
      const Slots now{count,
                      cache[1],
                      sizes.width / sizes.key_width,
                      cache[2],
                      cache[3],
                      in.call->own_start,
                      rows.slots.data(),
                      rows.positions.data(),
                      rows.leaders.data(),
                      rows.prefixes.data()};
      decode_attention(layer.attention.arrays, layer.attention_adapters, sizes, now,
                       {in.cos, in.sin, cache[3], numbers.epsilon}, numbers.scale, rows.angles.data(), tiles, x, x,
                       layer.caches.arrays.keys, layer.caches.arrays.values, rest);
      decode_feed_forward(layer.feed_forward.arrays, layer.feed_forward_adapters, sizes, numbers.epsilon, tiles, x, x,
                          rest);
    }
    auto given = [&](int32_t slot) { return in.context[slot * tokens + t]; };
    if (std::any_of(rows.slots.begin(), rows.slots.end(), [&](int32_t slot) { return given(slot) < 0; })) {
      norm_tiles(tiles, x, in.norm, numbers.epsilon, h, hidden);
      products(tiles, h, hidden, {{in.head, nullptr, rest, vocabulary}});
    }
    parallel_pieces(count, 1, [&](int64_t i, int64_t) {
      const int64_t slot = rows.slots[i], at = slot * tokens + t;
      if (given(slot) >= 0) {
        next[slot] = out.token[at] = given(slot);
        return;
      }
      const SampledToken one = draw(rest + i * vocabulary, vocabulary, in.uniform[at], t < in.banned[slot], in.stops,
                                    stop_count, numbers.inverse_temperature, numbers.greedy);
      next[slot] = out.token[at] = one.token;
      out.behaviour[at] = one.behaviour, out.policy[at] = one.policy;
    });
    auto ended = [&](int32_t slot) {
      const auto stops = in.stops + stop_count;
      return t + 1 >= in.remaining[slot] || (given(slot) < 0 && std::find(in.stops, stops, next[slot]) != stops);
    };
    rows.slots.erase(std::remove_if(rows.slots.begin(), rows.slots.end(), ended), rows.slots.end());
  }
  return 0;
}

}  // extern "C"
