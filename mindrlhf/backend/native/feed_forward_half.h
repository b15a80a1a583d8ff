// The feed-forward half of a layer and its gradient: x + w2(silu(w1(norm(x))) * w3(norm(x))), or the same without adding x.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "factors.h"
#include "lanes.h"
#include "low_rank.h"
#include "matrix.h"
#include "names.h"
#include "team.h"

namespace {

template <typename Number>  // most inner columns per block: packing a weight takes a larger part of a faster product's time
const int64_t kInner = std::is_same_v<Number, float> ? 192 : 1536;
const int64_t kNearPieces = 3;  // most pieces that use such a block one after another

// The first inputs of both operators below; the weights follow. x [asking, hidden]: the asking rows, padded; lengths
// int32[N * (1 + G)]: see `Sequences`.
struct FeedForwardInputs {
  Input x;
  const int32_t *lengths;
  const HalfNumbers *numbers;
};

// The inputs and sizes of both operators. Number: the type of factors.
template <typename Number>
struct FeedForwardHalf {
  FeedForwardInputs in;
  Given<FeedForwardWeights, Input> given;
  const FeedForwardWeights<Input> &weights;
  FactorMemory<Number> memory;
  const FeedForwardWeights<const Number *> matrices;
  FeedForwardAdapters<Number> adapters;
  Sequences sequences;
  int64_t rows, hidden, inner, piece;  // rows: unpadded asking rows; piece: rows per piece of the gradient

  explicit FeedForwardHalf(Arguments &arguments)
      : in(arguments.next<FeedForwardInputs>()),
        given(arguments.next<FeedForwardWeights, Input>(in.numbers->weights)),
        weights(given.arrays),
        memory(matrix_numbers(given)),
        matrices(matrix_factors(given, memory.data())),
        adapters(adapters_of(given, matrices)),
        sequences(*in.numbers, in.lengths, arguments.shape(INDEX(FeedForwardInputs, lengths))[0]),
        rows(sequences.asking()),
        hidden(arguments.shape(INDEX(FeedForwardInputs, x))[1]),
        inner(given.shapes.w1[0]),
        piece(summed_piece<Number>(rows)) {}
  FeedForwardHalf(const FeedForwardHalf &) = delete;

  // See `Sequences`; `first` and m count unpadded asking rows.
  Input take(Input array, int64_t first, int64_t m, Output memory) const {
    return sequences.take(array, hidden, sequences.all_skip, sequences.skip + first, m, memory);
  }
  Output target(Output array, int64_t first, int64_t m, Output memory) const {
    return sequences.target(array, hidden, sequences.all_skip, sequences.skip + first, m, memory);
  }
  void put(Input source, int64_t first, int64_t m, Output array) const {
    sequences.put(source, hidden, sequences.all_skip, sequences.skip + first, m, array);
  }
};

// Computes the half. Outputs: y like x; and unpadded: gate and up [rows, inner].
template <typename Number>
int feed_forward_half_of(void **params, int *ndims, int64_t **shapes) {
  struct Outputs {
    Output y, gate, up;
  };
  Arguments arguments(params, ndims, shapes);
  const FeedForwardHalf<Number> h(arguments);
  const auto &w = h.weights;
  const auto &f = h.matrices;
  const auto out = arguments.next<Outputs>();
  const int64_t hidden = h.hidden, inner = h.inner;
  h.sequences.zero_unused(out.y, hidden, h.sequences.all_skip);
  parallel_pieces(h.rows, paired_piece<Number>(h.rows), [&](int64_t first, int64_t m) {
    Output memory = scratch(m * (2 * hidden + inner + 2 * h.adapters.rank())), near = memory + m * hidden;
    Output low = near + m * (hidden + inner);
    auto normed = reinterpret_cast<Number *>(near), act = reinterpret_cast<Number *>(near + m * hidden);
    Input x = h.take(h.in.x, first, m, memory);
    Output gate = out.gate + first * inner, up = out.up + first * inner;
    norm_rows(x, w.norm, h.in.numbers->epsilon, normed, m, hidden);
    gemm_rows('T', m, inner, hidden, 1, normed, hidden, f.w1, hidden, 0, gate, inner);
    gemm_rows('T', m, inner, hidden, 1, normed, hidden, f.w3, hidden, 0, up, inner);
    h.adapters.gate.add(normed, m, hidden, gate, inner, low);
    h.adapters.up.add(normed, m, hidden, up, inner, low);
    add_bias(w.w1_bias, gate, m, inner, inner);
    add_bias(w.w3_bias, up, m, inner, inner);
    gated(gate, up, act, m * inner);
    Output y = h.target(out.y, first, m, near);
    if (h.in.numbers->residual) std::copy(x, x + m * hidden, y);
    gemm_rows('T', m, hidden, inner, 1, act, inner, f.w2, inner, h.in.numbers->residual, y, hidden);
    h.adapters.down.add(act, m, inner, y, hidden, low);
    add_bias(w.w2_bias, y, m, hidden, hidden);
    h.put(y, first, m, out.y);
  });
  return 0;
}

// The gradient of the half. Inputs: as in `feed_forward_half`; its outputs gate and up (overwritten); dy like x; gradient
// buffers of some weights, to which gradients are added. Outputs: dx like x, and memory for intermediate results.
template <typename Number>
class FeedForwardGradient {
 public:
  explicit FeedForwardGradient(Arguments &arguments)
      : h_(arguments),
        kept_(arguments.next<Kept>()),
        buffers_(arguments.next<FeedForwardWeights, Output>(h_.in.numbers->buffers).arrays),
        out_(arguments.next<Outputs>()),
        hidden_(h_.hidden),
        inner_(h_.inner),
        parts_((h_.rows + h_.piece - 1) / h_.piece),
        block_((even_piece(inner_, kInner<Number>) + kLanes - 1) / kLanes * kLanes),
        dense_(h_.sequences.adjacent(h_.sequences.skip, h_.rows)),
        d_y_(dense_ ? h_.take(kept_.dy, 0, h_.rows, nullptr) : out_.packed),
        normed_(reinterpret_cast<Number *>(out_.normed)),
        act_(reinterpret_cast<Number *>(out_.act)),
        gate_map_(h_.adapters.gate, h_.rows),
        up_map_(h_.adapters.up, h_.rows),
        down_map_(h_.adapters.down, h_.rows),
        d_output_(d_y_, h_.rows, hidden_),
        d_gate_(kept_.gate, h_.rows, inner_),
        d_up_(kept_.up, h_.rows, inner_),
        norms_(parts_ * hidden_) {}
  FeedForwardGradient(const FeedForwardGradient &) = delete;

  void run() {
    h_.sequences.zero_unused(out_.dx, hidden_, h_.sequences.all_skip);
    const int64_t together = std::clamp<int64_t>(parts_ / ThreadTeam::get().threads(), 1, kNearPieces);
    parallel_pieces(parts_, together, [&](int64_t part, int64_t n) {
      const int64_t begin = part * h_.piece;
      compute(begin, std::min(begin + n * h_.piece, h_.rows));
    });
    add_to_buffers();
  }

 private:
  struct Kept {
    Output gate, up;
    Input dy;
  };
  struct Outputs {
    Output dx, normed, act, packed;
  };

  // Computes dx of the rows of several pieces, which use a block of the weights while it is in the processor's cache.
  void compute(int64_t begin, int64_t end) {
    const int64_t count = end - begin;
    Output d_normed = scratch(2 * count * hidden_ + h_.piece * std::max(block_, hidden_));
    Output memory = d_normed + count * hidden_, slope = memory + count * hidden_;
    Input x = h_.take(h_.in.x, begin, count, memory);
    if (!dense_) {
      Input own = h_.take(kept_.dy, begin, count, out_.packed + begin * hidden_);
      if (own != d_y_ + begin * hidden_) std::copy(own, own + count * hidden_, out_.packed + begin * hidden_);
    }
    norm_rows(x, h_.weights.norm, h_.in.numbers->epsilon, normed_ + begin * hidden_, count, hidden_);
    gate_map_.input(begin, count, normed_ + begin * hidden_, hidden_, 0, hidden_, hidden_);
    up_map_.input(begin, count, normed_ + begin * hidden_, hidden_, 0, hidden_, hidden_);
    down_map_.output(begin, count, d_output_.round(begin, count), hidden_, 0, hidden_);
    for (int64_t j = 0; j < inner_; j += block_) {
      for (int64_t first = begin; first < end; first += h_.piece) {
        through_block(first, std::min(h_.piece, end - first), j, slope, d_normed + (first - begin) * hidden_);
      }
    }
    gate_map_.add(begin, count, d_normed, hidden_, 0, hidden_, hidden_);
    up_map_.add(begin, count, d_normed, hidden_, 0, hidden_, hidden_);
    for (int64_t first = begin; first < end; first += h_.piece) {
      const int64_t at = (first - begin) * hidden_;
      through_norm(first, std::min(h_.piece, end - first), d_normed + at, x + at, slope);
    }
  }

  // Adds to d_normed what m rows from `first` on get through the inner columns of a block, from j on.
  void through_block(int64_t first, int64_t m, int64_t j, Output slope, Output d_normed) {
    const int64_t size = std::min(block_, inner_ - j), at = first * inner_ + j;
    Number *gate = d_gate_.at(first) + j, *up = d_up_.at(first) + j;
    gemm_rows('N', m, size, hidden_, 1, d_output_.at(first), hidden_, h_.matrices.w2 + j, inner_, 0, slope, size);
    down_map_.add(first, m, slope, size, j, size, inner_);
    for (int64_t i = 0; i < m; ++i) {
      Input g = kept_.gate + at + i * inner_, u = kept_.up + at + i * inner_;
      gated(g, u, act_ + at + i * inner_, size);
      gated_gradient(slope + i * size, g, u, gate + i * inner_, up + i * inner_, size);
    }
    gemm_rows('N', m, hidden_, size, 1, gate, inner_, h_.matrices.w1 + j * hidden_, hidden_, j > 0, d_normed, hidden_);
    gemm_rows('N', m, hidden_, size, 1, up, inner_, h_.matrices.w3 + j * hidden_, hidden_, 1, d_normed, hidden_);
    down_map_.input(first, m, act_ + at, inner_, j, size, inner_);
    gate_map_.output(first, m, gate, inner_, j, size);
    up_map_.output(first, m, up, inner_, j, size);
  }

  // Computes dx of m rows from d_normed. memory: of the slopes, which are no longer needed; rows that are not adjacent are
  // computed there.
  void through_norm(int64_t first, int64_t m, Input d_normed, Input x, Output memory) {
    Output dx = h_.target(out_.dx, first, m, memory);
    Input own = d_y_ + first * hidden_;
    if (h_.in.numbers->residual) std::copy(own, own + m * hidden_, dx);
    else std::fill(dx, dx + m * hidden_, 0.0f);
    norm_gradient_rows(d_normed, x, h_.weights.norm, h_.in.numbers->epsilon, dx,
                       norms_.data() + first / h_.piece * hidden_, m, hidden_, true);
    h_.put(dx, first, m, out_.dx);
  }

  // Adds the gradients of weights, biases and the norm.
  void add_to_buffers() {
    weight_gradients<Number>({{h_.rows, d_output_.at(0), act_, buffers_.w2, hidden_, inner_},
                              {h_.rows, d_gate_.at(0), normed_, buffers_.w1, inner_, hidden_},
                              {h_.rows, d_up_.at(0), normed_, buffers_.w3, inner_, hidden_},
                              down_map_.of_a(act_, inner_, buffers_.w2_a),
                              down_map_.of_b(d_output_.at(0), hidden_, buffers_.w2_b),
                              gate_map_.of_a(normed_, hidden_, buffers_.w1_a),
                              gate_map_.of_b(d_gate_.at(0), inner_, buffers_.w1_b),
                              up_map_.of_a(normed_, hidden_, buffers_.w3_a),
                              up_map_.of_b(d_up_.at(0), inner_, buffers_.w3_b)});
    add_rows(d_gate_.at(0), h_.rows, inner_, buffers_.w1_bias);
    add_rows(d_up_.at(0), h_.rows, inner_, buffers_.w3_bias);
    add_rows(d_y_, h_.rows, hidden_, buffers_.w2_bias);
    add_rows(norms_.data(), parts_, hidden_, buffers_.norm);
  }

  const FeedForwardHalf<Number> h_;
  const Kept kept_;
  const FeedForwardWeights<Output> buffers_;
  const Outputs out_;
  const int64_t hidden_, inner_, parts_, block_;  // block_: inner columns per block
  const bool dense_;
  Input d_y_;
  Number *const normed_, *const act_;
  LowRankGradient<Number> gate_map_, up_map_, down_map_;
  const FactorRows<Number> d_output_;
  const FactorRows<Number, Output> d_gate_, d_up_;
  std::vector<float> norms_;  // gradients of the norm, of each piece
};

template <typename Number>
int feed_forward_half_gradient_of(void **params, int *ndims, int64_t **shapes) {
  Arguments arguments(params, ndims, shapes);
  FeedForwardGradient<Number>(arguments).run();
  return 0;
}

}  // namespace

ENTRY_POINTS(feed_forward_half)
ENTRY_POINTS(feed_forward_half_gradient)
