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
    gated(gate, up, act, m * inner);
    Output y = h.target(out.y, first, m, near);
    if (h.in.numbers->residual) std::copy(x, x + m * hidden, y);
    gemm_rows('T', m, hidden, inner, 1, act, inner, f.w2, inner, h.in.numbers->residual, y, hidden);
    h.adapters.down.add(act, m, inner, y, hidden, low);
    h.put(y, first, m, out.y);
  });
  return 0;
}

// Computes the half's gradient. Inputs: as in `feed_forward_half`; its outputs gate and up (overwritten); dy like x;
// gradient buffers of some weights, to which gradients are added. Outputs: dx like x, and memory for intermediate results.
template <typename Number>
int feed_forward_half_gradient_of(void **params, int *ndims, int64_t **shapes) {
  struct Kept {
    Output gate, up;
    Input dy;
  };
  struct Outputs {
    Output dx, normed, act, packed;
  };
  Arguments arguments(params, ndims, shapes);
  const FeedForwardHalf<Number> h(arguments);
  const auto &w = h.weights;
  const auto &f = h.matrices;
  const auto kept = arguments.next<Kept>();
  const auto buffers = arguments.next<FeedForwardWeights, Output>(h.in.numbers->buffers).arrays;
  const auto out = arguments.next<Outputs>();
  const int64_t hidden = h.hidden, inner = h.inner, parts = (h.rows + h.piece - 1) / h.piece;
  const bool dense = h.sequences.adjacent(h.sequences.skip, h.rows);
  Input d_y = dense ? h.take(kept.dy, 0, h.rows, nullptr) : out.packed;
  std::vector<float> norms(parts * hidden);
  LowRankGradient<Number> gate_map(h.adapters.gate, h.rows), up_map(h.adapters.up, h.rows);
  LowRankGradient<Number> down_map(h.adapters.down, h.rows);
  const FactorRows<Number> d_output(d_y, h.rows, hidden);
  const FactorRows<Number, Output> d_gate(kept.gate, h.rows, inner), d_up(kept.up, h.rows, inner);
  auto normed = reinterpret_cast<Number *>(out.normed), act = reinterpret_cast<Number *>(out.act);
  h.sequences.zero_unused(out.dx, hidden, h.sequences.all_skip);
  // Several pieces use a block of the weights while it is in the processor's cache.
  const int64_t block = (even_piece(inner, kInner<Number>) + kLanes - 1) / kLanes * kLanes;
  const int64_t together = std::clamp<int64_t>(parts / ThreadTeam::get().threads(), 1, kNearPieces);
  parallel_pieces(parts, together, [&](int64_t part, int64_t n) {
    const int64_t begin = part * h.piece, end = std::min(begin + n * h.piece, h.rows), count = end - begin;
    Output d_normed = scratch(2 * count * hidden + h.piece * std::max(block, hidden)), memory = d_normed + count * hidden;
    Output slope = memory + count * hidden;
    Input x = h.take(h.in.x, begin, count, memory);
    if (!dense) {
      Input own = h.take(kept.dy, begin, count, out.packed + begin * hidden);
      if (own != d_y + begin * hidden) std::copy(own, own + count * hidden, out.packed + begin * hidden);
    }
    norm_rows(x, w.norm, h.in.numbers->epsilon, normed + begin * hidden, count, hidden);
    gate_map.input(begin, count, normed + begin * hidden, hidden, 0, hidden, hidden);
    up_map.input(begin, count, normed + begin * hidden, hidden, 0, hidden, hidden);
    down_map.output(begin, count, d_output.round(begin, count), hidden, 0, hidden);
    for (int64_t j = 0; j < inner; j += block) {
      const int64_t size = std::min(block, inner - j);
      for (int64_t first = begin; first < end; first += h.piece) {
        const int64_t m = std::min(h.piece, end - first), at = first * inner + j;
        Output own = d_normed + (first - begin) * hidden;
        Number *gate = d_gate.at(first) + j, *up = d_up.at(first) + j;
        gemm_rows('N', m, size, hidden, 1, d_output.at(first), hidden, f.w2 + j, inner, 0, slope, size);
        down_map.add(first, m, slope, size, j, size, inner);
        for (int64_t i = 0; i < m; ++i) {
          Input g = kept.gate + at + i * inner, u = kept.up + at + i * inner;
          gated(g, u, act + at + i * inner, size);
          gated_gradient(slope + i * size, g, u, gate + i * inner, up + i * inner, size);
        }
        gemm_rows('N', m, hidden, size, 1, gate, inner, f.w1 + j * hidden, hidden, j > 0, own, hidden);
        gemm_rows('N', m, hidden, size, 1, up, inner, f.w3 + j * hidden, hidden, 1, own, hidden);
        down_map.input(first, m, act + at, inner, j, size, inner);
        gate_map.output(first, m, gate, inner, j, size);
        up_map.output(first, m, up, inner, j, size);
      }
    }
    gate_map.add(begin, count, d_normed, hidden, 0, hidden, hidden);
    up_map.add(begin, count, d_normed, hidden, 0, hidden, hidden);
    for (int64_t first = begin; first < end; first += h.piece) {
      const int64_t m = std::min(h.piece, end - first), at = (first - begin) * hidden;
      // Rows that are not adjacent are computed in the memory of their slopes, which are no longer needed.
      Output dx = h.target(out.dx, first, m, slope);
      Input own = d_y + first * hidden;
      if (h.in.numbers->residual) std::copy(own, own + m * hidden, dx);
      else std::fill(dx, dx + m * hidden, 0.0f);
      norm_gradient_rows(d_normed + at, x + at, w.norm, h.in.numbers->epsilon, dx, norms.data() + first / h.piece * hidden,
                         m, hidden, true);
      h.put(dx, first, m, out.dx);
    }
  });
  weight_gradients<Number>({{h.rows, d_output.at(0), act, buffers.w2, hidden, inner},
                            {h.rows, d_gate.at(0), normed, buffers.w1, inner, hidden},
                            {h.rows, d_up.at(0), normed, buffers.w3, inner, hidden},
                            down_map.of_a(act, inner, buffers.w2_a),
                            down_map.of_b(d_output.at(0), hidden, buffers.w2_b),
                            gate_map.of_a(normed, hidden, buffers.w1_a),
                            gate_map.of_b(d_gate.at(0), inner, buffers.w1_b),
                            up_map.of_a(normed, hidden, buffers.w3_a),
                            up_map.of_b(d_up.at(0), inner, buffers.w3_b)});
  add_rows(norms.data(), parts, hidden, buffers.norm);
  return 0;
}

}  // namespace

ENTRY_POINTS(feed_forward_half)
ENTRY_POINTS(feed_forward_half_gradient)
