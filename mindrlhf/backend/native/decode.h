// Generation of several tokens per slot, from the embedding to the draw.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "decode_halves.h"
#include "drafts.h"
#include "factors.h"
#include "lanes.h"
#include "names.h"
#include "column_tiles.h"
#include "slots.h"
#include "team.h"

namespace {

struct SampledToken {
  int32_t token;
  float behaviour, policy;  // log-probs
};

// Draws one token from `size` logits. stops: tokens that are not drawn if `banned`; inverse: inverse temperature.
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
    // Takes the first token whose cumulative weight exceeds uniform * total, or else the last token with a positive weight.
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
    token = std::max<int64_t>(token, 0);  // if weights are NaN
  }
  const float below = logits[token] * inverse - top;
  double every = total;
  if (banned) for_stops([&](int32_t id) { every += exponential(logits[id] * inverse - top); });
  return {static_cast<int32_t>(token), greedy ? 0.0f : below - static_cast<float>(std::log(total)),
          below - static_cast<float>(std::log(every))};
}

// The numbers of one call. enough: no further step starts with this many active slots or fewer; own_start: a slot's first
// own cache position, behind the longest prompt; steps: most steps. A step draws one token of a slot, or more with a draft.
struct DecodeCall {
  int32_t enough, own_start, steps;
};

const int64_t kContextRows = 128, kSlotRows = 32;  // context tokens per step, of all slots and of one slot

// The first inputs: ids .. prefixes int32[B], context int32[B, n], histories int32[B, h], uniform [B, n], stops int32[s],
// weights int32[2 * layers]; see `decode_tokens` in operators.py.
struct DecodeInputs {
  const int32_t *ids, *places, *angles, *remaining, *banned, *leaders, *prefixes;
  const DecodeCall *call;
  const int32_t *context, *histories;
  Input uniform;
  const int32_t *stops;
  Input embedding, cos, sin, norm, head;
  const DecodeNumbers *numbers;
  const int32_t *weights;
};

// The caches of a layer, which follow in the inputs between the weights of its halves: see `CacheArrays`.
template <typename Array>
struct DecodeCaches {
  Array keys, values;
};

template <typename Number>
struct DecodeLayer {
  Given<AttentionWeights, Input> attention;
  Given<DecodeCaches, Output> caches;
  Given<FeedForwardWeights, Input> feed_forward;
  LinearMaps<Number> attention_maps, feed_forward_maps;
  DecodeSizes sizes;

  // Reads the next layer's inputs. bits: which weights of its halves are given.
  DecodeLayer(Arguments &arguments, const int32_t *bits, int64_t hidden)
      : attention(arguments.next<AttentionWeights, Input>(bits[0])),
        caches(arguments.next<DecodeCaches, Output>(3)),
        feed_forward(arguments.next<FeedForwardWeights, Input>(bits[1])),
        attention_maps(maps_of<Number>(attention, hidden)),
        feed_forward_maps(maps_of<Number>(feed_forward, hidden)),
        sizes{hidden, attention.shapes.wq[0], attention.shapes.wk[0], feed_forward.shapes.w1[0],
              std::max(inner_memory(attention_maps), inner_memory(feed_forward_maps))} {}

  int64_t words() const { return attention_maps.words() + feed_forward_maps.words(); }

  // Packs the weights into memory of words() words; the caller does this before it computes the layer.
  void pack(Word *memory) {
    attention_maps.pack(memory);
    feed_forward_maps.pack(memory + attention_maps.words());
  }
};

// counts: the numbers of steps, draft tokens, and accepted draft tokens.
struct DecodeOutputs {
  int32_t *token;
  Output behaviour, policy;
  int32_t *counts;
};

// The active slots, and the rows of a step: one for each token whose next token is computed. If the context gives the next
// token, it is not drawn, and it is the slot's next row in the same step. Draft tokens are rows too; the token drawn after a
// draft token counts if the draft token is accepted. Drafts take columns that the products compute anyway.
struct DecodeRows {
  std::vector<int32_t> active, ids, slots, positions, angles, leaders, prefixes;
  std::vector<int32_t> drawing;  // rows after which a token is drawn: a slot's last one, then its draft's rows
  std::vector<int32_t> draft;

  // Collects the rows of the next step. Updates last, each slot's last token, and at, its number of tokens so far. Writes
  // context tokens to out int32[B, n]. known: positions in the tables of angles. least: see `ColumnTiles`.
  void next_step(const DecodeInputs &in, int64_t n, int64_t known, int64_t least, Drafts &drafts,
                 std::vector<int32_t> &last, std::vector<int32_t> &at, int32_t *out) {
    for (auto *part : {&ids, &slots, &positions, &angles, &leaders, &prefixes, &drawing}) part->clear();
    int64_t room = kContextRows, left = active.size(), spare = ColumnTiles(left, least).columns - left;
    for (const int32_t slot : active) {
      const int64_t most = std::min<int64_t>(in.remaining[slot], n);
      for (int64_t own = 0;; ++own, --room) {
        int32_t &t = at[slot];
        add(in, slot, last[slot], t, known);
        const int32_t given = in.context[slot * n + t];
        if (given < 0) {
          drawing.push_back(ids.size() - 1);
          drafts.propose(slot, std::min((spare + left - 1) / left, most - t - 1), draft);
          for (size_t i = 0; i < draft.size(); ++i) {
            add(in, slot, draft[i], t + 1 + i, known);
            drawing.push_back(ids.size() - 1);
          }
          spare -= draft.size();
          break;
        }
        last[slot] = out[slot * n + t++] = given;
        drafts.add(slot, given);
        if (t >= most || own + 1 == kSlotRows || room == 0) break;
      }
      --left;
    }
  }

  void add(const DecodeInputs &in, int32_t slot, int32_t id, int32_t t, int64_t known) {
    ids.push_back(id), slots.push_back(slot);
    positions.push_back(in.places[slot] + t), angles.push_back(std::min<int64_t>(in.angles[slot] + t, known - 1));
    leaders.push_back(in.leaders[slot]), prefixes.push_back(in.prefixes[slot]);
  }
};

// Draws up to n tokens per slot; slots that have ended are left out. Context tokens are used as given: they are not drawn
// and end no slot, and a step computes several of a slot.
// Outputs: token int32[B, n], -1 for none; behaviour, policy log-probs [B, n], 0 for tokens not drawn; counts int32[3].
template <typename Number>
int decode_tokens_of(void **params, int *ndims, int64_t **shapes) {
  Arguments arguments(params, ndims, shapes);
  const auto in = arguments.next<DecodeInputs>();
  const int64_t slots = shapes[INDEX(DecodeInputs, uniform)][0], tokens = shapes[INDEX(DecodeInputs, uniform)][1];
  const int64_t vocabulary = shapes[INDEX(DecodeInputs, head)][0], hidden = shapes[INDEX(DecodeInputs, norm)][0];
  const int64_t known = shapes[INDEX(DecodeInputs, cos)][0], d = shapes[INDEX(DecodeInputs, cos)][1];
  const int64_t stop_count = shapes[INDEX(DecodeInputs, stops)][0];
  const int64_t least = kLeastColumns<Number>;
  const DecodeNumbers &numbers = *in.numbers;
  std::vector<DecodeLayer<Number>> layers;
  LinearMaps<Number> head;
  head.add(in.head, shapes[INDEX(DecodeInputs, head)], hidden);
  int64_t all_words = head.words(), most = 0;  // most: floats of memory per column
  for (int64_t i = 0; i < shapes[INDEX(DecodeInputs, weights)][0]; i += 2) {
    all_words += layers.emplace_back(arguments, in.weights + i, hidden).words();
  }
  const WordMemory words(all_words);
  head.pack(words.data());
  Word *next = words.data() + head.words();
  for (DecodeLayer<Number> &layer : layers) {
    layer.pack(next);
    next += layer.words();
    most = std::max(most, layer.sizes.template memory<Number>());
  }
  const auto out = arguments.next<DecodeOutputs>();
  std::fill(out.token, out.token + slots * tokens, -1);
  std::fill(out.behaviour, out.behaviour + slots * tokens, 0.0f);
  std::fill(out.policy, out.policy + slots * tokens, 0.0f);

  DecodeRows rows;
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (in.remaining[slot] > 0) rows.active.push_back(slot);
  }
  std::fill(out.counts, out.counts + 3, 0);
  Drafts drafts(in.histories, slots, shapes[INDEX(DecodeInputs, histories)][1]);
  std::vector<int32_t> last(in.ids, in.ids + slots), at(slots, 0);
  thread_local std::vector<float> memory;
  const size_t enough = std::max(in.call->enough, 0);
  for (int32_t step = 0; step < in.call->steps && rows.active.size() > (step ? enough : 0); ++step) {
    rows.next_step(in, tokens, known, least, drafts, last, at, out.token);
    const int64_t count = rows.ids.size();
    const ColumnTiles tiles(count, least), drawn(rows.drawing.size(), least);
    const size_t layered = tiles.columns * (hidden + most);
    const size_t all = layered + drawn.columns * (2 * hidden + vocabulary + words_apart<Number>(hidden));
    memory.resize(std::max(memory.size(), all));
    Output x = memory.data(), rest = x + tiles.columns * hidden, h = x + layered, normed = h + drawn.columns * hidden;
    Output logits = normed + drawn.columns * hidden, apart = logits + drawn.columns * vocabulary;
    to_tiles(tiles, hidden, [&](int64_t row) { return in.embedding + rows.ids[row] * hidden; }, x);
    for (const DecodeLayer<Number> &layer : layers) {
      const DecodeSizes &sizes = layer.sizes;
      Shape cache = layer.caches.shapes.keys;
      const Slots now{count,
                      cache[1],
                      sizes.width / sizes.key_width,
                      cache[2],
                      d,
                      in.call->own_start,
                      rows.slots.data(),
                      rows.positions.data(),
                      rows.leaders.data(),
                      rows.prefixes.data()};
      decode_attention<Number>(layer.attention.arrays, layer.attention_maps, sizes, now,
                       {in.cos, in.sin, d, numbers.epsilon}, numbers.scale, rows.angles.data(), tiles, x, x,
                       {layer.caches.arrays.keys, layer.caches.arrays.values, cache[3] != d}, rest);
      decode_feed_forward<Number>(layer.feed_forward.arrays, layer.feed_forward_maps, sizes,
                          numbers.epsilon, tiles, x, x, rest);
    }
    pick_tiles(tiles, x, drawn, rows.drawing.data(), hidden, h);
    norm_tiles(drawn, h, in.norm, numbers.epsilon, normed, hidden);
    products<Number>(drawn, tile_words<Number>(drawn, normed, hidden, apart), {{&head[0], nullptr, logits, nullptr}});
    std::vector<SampledToken> found(drawn.rows);
    parallel_pieces(drawn.rows, 1, [&](int64_t i, int64_t) {
      const int64_t row = rows.drawing[i], slot = rows.slots[row], t = rows.positions[row] - in.places[slot];
      found[i] = draw(logits + i * vocabulary, vocabulary, in.uniform[slot * tokens + t], t < in.banned[slot], in.stops,
                      stop_count, numbers.inverse_temperature, numbers.greedy);
    });
    const auto stops = in.stops + stop_count;
    auto stops_at = [&](int32_t id) { return std::find(in.stops, stops, id) != stops; };
    for (int64_t i = 0, end = 0; i < drawn.rows; i = end) {
      const int32_t slot = rows.slots[rows.drawing[i]];
      while (end < drawn.rows && rows.slots[rows.drawing[end]] == slot) ++end;
      int64_t right = 0;  // accepted draft tokens
      for (int64_t next = i;; ++next, ++right) {
        const SampledToken &one = found[next];
        const int64_t place = slot * tokens + at[slot]++;
        last[slot] = out.token[place] = one.token;
        out.behaviour[place] = one.behaviour, out.policy[place] = one.policy;
        drafts.add(slot, one.token);
        if (stops_at(one.token) || next + 1 == end || rows.ids[rows.drawing[next + 1]] != one.token) break;
      }
      drafts.judge(slot, end - i - 1, right);
      out.counts[1] += end - i - 1, out.counts[2] += right;
    }
    ++out.counts[0];
    auto ended = [&](int32_t slot) {
      const bool was_drawn = in.context[slot * tokens + at[slot] - 1] < 0;
      return at[slot] >= std::min<int64_t>(in.remaining[slot], tokens) || (was_drawn && stops_at(last[slot]));
    };
    rows.active.erase(std::remove_if(rows.active.begin(), rows.active.end(), ended), rows.active.end());
  }
  return 0;
}

}  // namespace

DECODE_ENTRY_POINTS(decode_tokens)
