// Generation of several tokens per slot, from the embedding to the draw.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "decode_experts.h"
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
    sums.push_back(sum_over(
        end - first, [=](int64_t j) INLINE { return w[j] = w[j] == -INFINITY ? 0.0f : exponential(w[j] - top); }));
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

// The first inputs: ids .. prefixes int32[B], context int32[B, n], histories int32[B, h], uniform [B, n], rules [r, B],
// stops int32[s], weights int32[2 * layers], routing int32[B, layers with experts, S, chosen]; see `decode_tokens` in
// operators.py.
struct DecodeInputs {
  const int32_t *ids, *places, *angles, *remaining, *banned, *leaders, *prefixes;
  const DecodeCall *call;
  const int32_t *context, *histories;
  Input uniform, rules;
  const int32_t *stops;
  Input embedding, cos, sin, norm, head;
  const DecodeNumbers *numbers;
  const int32_t *weights;
  int32_t *routing;
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
        sizes{hidden, attention.shapes.wq[0], attention.shapes.wk[0], feed_forward_inner(feed_forward),
              std::max(inner_memory(attention_maps), feed_forward_memory(feed_forward, feed_forward_maps))} {}

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

// One call of `decode_tokens`. Context tokens are used as given: they are not drawn and end no slot, and a step computes
// several of a slot. Slots that have ended are left out.
template <typename Number>
class Decoding {
 public:
  Decoding(Arguments &arguments, int64_t **shapes)
      : in_(arguments.next<DecodeInputs>()),
        numbers_(*in_.numbers),
        slots_(shapes[INDEX(DecodeInputs, uniform)][0]),
        tokens_(shapes[INDEX(DecodeInputs, uniform)][1]),
        vocabulary_(shapes[INDEX(DecodeInputs, head)][0]),
        hidden_(shapes[INDEX(DecodeInputs, norm)][0]),
        known_(shapes[INDEX(DecodeInputs, cos)][0]),
        d_(shapes[INDEX(DecodeInputs, cos)][1]),
        stops_end_(in_.stops + shapes[INDEX(DecodeInputs, stops)][0]),
        routing_(shapes[INDEX(DecodeInputs, routing)]),
        words_(read_weights(arguments, shapes)),
        out_(arguments.next<DecodeOutputs>()),
        drafts_(in_.histories, slots_, shapes[INDEX(DecodeInputs, histories)][1]),
        last_(in_.ids, in_.ids + slots_),
        at_(slots_, 0) {
    pack_weights();
    std::fill(out_.token, out_.token + slots_ * tokens_, -1);
    std::fill(out_.behaviour, out_.behaviour + slots_ * tokens_, 0.0f);
    std::fill(out_.policy, out_.policy + slots_ * tokens_, 0.0f);
    std::fill(out_.counts, out_.counts + 3, 0);
    for (int64_t slot = 0; slot < slots_; ++slot) {
      if (in_.remaining[slot] > 0) rows_.active.push_back(slot);
    }
  }
  Decoding(const Decoding &) = delete;

  void run() {
    const size_t enough = std::max(in_.call->enough, 0);
    for (int32_t step = 0; step < in_.call->steps && rows_.active.size() > (step ? enough : 0); ++step) {
      rows_.next_step(in_, tokens_, known_, kLeastColumns<Number>, drafts_, last_, at_, out_.token);
      const ColumnTiles tiles(rows_.ids.size(), kLeastColumns<Number>), drawn(rows_.drawing.size(), kLeastColumns<Number>);
      accept(draw_all(drawn, compute(tiles, drawn)));
      ++out_.counts[0];
      auto ended = [&](int32_t slot) { return has_ended(slot); };
      rows_.active.erase(std::remove_if(rows_.active.begin(), rows_.active.end(), ended), rows_.active.end());
    }
  }

 private:
  // Reads the weights of all layers and of the head; returns the words of all when they are packed.
  int64_t read_weights(Arguments &arguments, int64_t **shapes) {
    head_.add(in_.head, shapes[INDEX(DecodeInputs, head)], hidden_);
    int64_t words = head_.words();
    for (int64_t i = 0; i < shapes[INDEX(DecodeInputs, weights)][0]; i += 2) {
      words += layers_.emplace_back(arguments, in_.weights + i, hidden_).words();
    }
    return words;
  }

  void pack_weights() {
    head_.pack(words_.data());
    Word *next = words_.data() + head_.words();
    for (DecodeLayer<Number> &layer : layers_) {
      layer.pack(next);
      next += layer.words();
      most_ = std::max(most_, layer.sizes.template memory<Number>());
    }
  }

  // Runs the layers and the head on a step's rows; returns the logits [drawn.columns, vocabulary].
  Input compute(const ColumnTiles &tiles, const ColumnTiles &drawn) {
    thread_local std::vector<float> memory;
    const size_t layered = tiles.columns * (hidden_ + most_);
    const size_t all = layered + drawn.columns * (2 * hidden_ + vocabulary_ + words_apart<Number>(hidden_));
    memory.resize(std::max(memory.size(), all));
    Output x = memory.data(), rest = x + tiles.columns * hidden_, h = x + layered, normed = h + drawn.columns * hidden_;
    Output logits = normed + drawn.columns * hidden_, apart = logits + drawn.columns * vocabulary_;
    to_tiles(tiles, hidden_, [&](int64_t row) { return in_.embedding + rows_.ids[row] * hidden_; }, x);
    experts_done_ = 0;
    for (const DecodeLayer<Number> &layer : layers_) compute_layer(layer, tiles, x, rest);
    pick_tiles(tiles, x, drawn, rows_.drawing.data(), hidden_, h);
    norm_tiles(drawn, h, in_.norm, numbers_.epsilon, normed, hidden_);
    products<Number>(drawn, tile_words<Number>(drawn, normed, hidden_, apart), {{&head_[0], nullptr, logits, nullptr}});
    return logits;
  }

  void compute_layer(const DecodeLayer<Number> &layer, const ColumnTiles &tiles, Output x, Output memory) {
    const DecodeSizes &sizes = layer.sizes;
    Shape cache = layer.caches.shapes.keys;
    const Slots now{static_cast<int64_t>(rows_.ids.size()),
                    cache[1],
                    sizes.width / sizes.key_width,
                    cache[2],
                    d_,
                    in_.call->own_start,
                    rows_.slots.data(),
                    rows_.positions.data(),
                    rows_.leaders.data(),
                    rows_.prefixes.data()};
    decode_attention<Number>(layer.attention.arrays, layer.attention_maps, sizes, now,
                             {in_.cos, in_.sin, d_, numbers_.epsilon}, numbers_.scale, rows_.angles.data(), tiles, x, x,
                             {layer.caches.arrays.keys, layer.caches.arrays.values, cache[3] != d_}, memory);
    const auto &weights = layer.feed_forward.arrays;
    if (weights.router) {
      const ExpertChoice choice{numbers_.chosen, numbers_.normalises != 0};
      std::vector<int32_t> places(numbers_.records ? rows_.ids.size() : 0);
      for (size_t row = 0; row < places.size(); ++row) places[row] = now.base + now.own(row) - 1;
      const RoutingRecord record{numbers_.records ? in_.routing : nullptr, routing_[1], experts_done_++, routing_[2],
                                 rows_.slots.data(), places.data()};
      return decode_experts<Number>(weights, layer.feed_forward_maps, sizes, numbers_.epsilon, choice, record, tiles, x, x,
                                    memory);
    }
    decode_feed_forward<Number>(weights, layer.feed_forward_maps, sizes, numbers_.epsilon, tiles, x, x, memory);
  }

  std::vector<SampledToken> draw_all(const ColumnTiles &drawn, Input logits) const {
    std::vector<SampledToken> found(drawn.rows);
    parallel_pieces(drawn.rows, 1, [&](int64_t i, int64_t) {
      const int64_t row = rows_.drawing[i], slot = rows_.slots[row], t = rows_.positions[row] - in_.places[slot];
      const float inverse = in_.rules[slot];  // the first number of its rule; 0: greedy
      found[i] = draw(logits + i * vocabulary_, vocabulary_, in_.uniform[slot * tokens_ + t], t < in_.banned[slot],
                      in_.stops, stops_end_ - in_.stops, inverse > 0 ? inverse : 1.0f, !(inverse > 0));
    });
    return found;
  }

  // Takes each slot's drawn tokens: the first, and those after accepted draft tokens.
  void accept(const std::vector<SampledToken> &found) {
    const int64_t count = found.size();
    for (int64_t i = 0, end = 0; i < count; i = end) {
      const int32_t slot = rows_.slots[rows_.drawing[i]];
      while (end < count && rows_.slots[rows_.drawing[end]] == slot) ++end;
      int64_t right = 0;  // accepted draft tokens
      for (int64_t next = i;; ++next, ++right) {
        const SampledToken &one = found[next];
        const int64_t place = slot * tokens_ + at_[slot]++;
        last_[slot] = out_.token[place] = one.token;
        out_.behaviour[place] = one.behaviour, out_.policy[place] = one.policy;
        drafts_.add(slot, one.token);
        if (stops_at(one.token) || next + 1 == end || rows_.ids[rows_.drawing[next + 1]] != one.token) break;
      }
      drafts_.judge(slot, end - i - 1, right);
      out_.counts[1] += end - i - 1, out_.counts[2] += right;
    }
  }

  bool stops_at(int32_t id) const { return std::find(in_.stops, stops_end_, id) != stops_end_; }

  bool has_ended(int32_t slot) const {
    const bool was_drawn = in_.context[slot * tokens_ + at_[slot] - 1] < 0;
    return at_[slot] >= std::min<int64_t>(in_.remaining[slot], tokens_) || (was_drawn && stops_at(last_[slot]));
  }

  const DecodeInputs in_;
  const DecodeNumbers &numbers_;
  const int64_t slots_, tokens_, vocabulary_, hidden_, known_, d_;  // known_: positions in the tables of angles
  const int32_t *const stops_end_;
  const Shape routing_;  // of the cache of the routing
  std::vector<DecodeLayer<Number>> layers_;
  LinearMaps<Number> head_;
  int64_t most_ = 0, experts_done_ = 0;  // floats of memory per column; layers with experts that a step has computed
  const WordMemory words_;
  const DecodeOutputs out_;
  DecodeRows rows_;
  Drafts drafts_;
  std::vector<int32_t> last_, at_;  // of each slot: the last token, and the number of tokens so far
};

// Draws up to n tokens per slot. Outputs: token int32[B, n], -1 for none; behaviour, policy log-probs [B, n], 0 for tokens
// not drawn; counts int32[3].
template <typename Number>
int decode_tokens_of(void **params, int *ndims, int64_t **shapes) {
  Arguments arguments(params, ndims, shapes);
  Decoding<Number>(arguments, shapes).run();
  return 0;
}

}  // namespace

DECODE_ENTRY_POINTS(decode_tokens)
