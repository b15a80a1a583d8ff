// The attention half of a layer and its gradient: x + wo(attention(norm(x))), or the same without adding x.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attention.h"
#include "factors.h"
#include "lanes.h"
#include "low_rank.h"
#include "matrix.h"
#include "names.h"
#include "team.h"

namespace {

// The first inputs of both operators below; the weights follow. x [T, hidden]; cos, sin [positions, d]; positions int32[T];
// asking: any array with as many rows as the output; lengths int32[N * (1 + G)]: see `Sequences`.
struct AttentionInputs {
  Input x, cos, sin;
  const int32_t *positions, *asking, *lengths;
  const HalfNumbers *numbers;
};

// The inputs and sizes of both operators. Number: the type of factors; attention itself always has float factors.
template <typename Number>
struct AttentionHalf {
  AttentionInputs in;
  Given<AttentionWeights, Input> given;
  const AttentionWeights<Input> &weights;
  FactorMemory<Number> memory;
  const AttentionWeights<const Number *> matrices;
  AttentionAdapters<Number> adapters;
  Sequences sequences;
  int64_t hidden, width, key_width;
  Attention attention;
  int64_t piece;  // rows per piece

  explicit AttentionHalf(Arguments &arguments)
      : in(arguments.next<AttentionInputs>()),
        given(arguments.next<AttentionWeights, Input>(in.numbers->weights)),
        weights(given.arrays),
        memory(matrix_numbers(given)),
        matrices(matrix_factors(given, memory.data())),
        adapters(adapters_of(given, matrices)),
        sequences(*in.numbers, in.lengths, arguments.shape(INDEX(AttentionInputs, lengths))[0]),
        hidden(arguments.shape(INDEX(AttentionInputs, x))[1]),
        width(given.shapes.wq[0]),
        key_width(given.shapes.wk[0]),
        attention{sequences,
                  {in.cos, in.sin, in.numbers->head_size, in.numbers->epsilon},
                  in.positions,
                  weights.q_norm,
                  key_width / in.numbers->head_size,
                  width / key_width,
                  in.numbers->scale},
        piece(summed_piece<Number>(sequences.rows)) {}
  AttentionHalf(const AttentionHalf &) = delete;

  // Prepares m rows of keys, from `first` on: from the projection's result to ready, both [rows, key_width].
  void prepare_keys(Input keys, int64_t first, int64_t m, Output ready) const {
    for (int64_t i = first; i < first + m; ++i) {
      const int64_t at = i * key_width;
      attention.turning.prepare(keys + at, weights.k_norm, attention.position(i), attention.heads, ready + at);
    }
  }
};

// Computes the half. Outputs: y [asking, hidden], padded; and unpadded: query [asking, width], key, value [rows, key_width],
// all from their projections, attended [asking, width], and prepared keys [rows, key_width].
template <typename Number>
int attention_half_of(void **params, int *ndims, int64_t **shapes) {
  struct Outputs {
    Output y, query, key, value, attended, ready;
  };
  Arguments arguments(params, ndims, shapes);
  const AttentionHalf<Number> h(arguments);
  const auto &w = h.weights;
  const auto &f = h.matrices;
  const auto out = arguments.next<Outputs>();
  const Sequences &s = h.sequences;
  const int64_t hidden = h.hidden, width = h.width;
  // If not all rows are asking rows, a piece may have few; another piece size would then give different last bits.
  parallel_pieces(s.rows, s.skip ? h.piece : paired_piece<Number>(s.rows), [&](int64_t first, int64_t m) {
    Output memory = scratch(2 * m * (hidden + h.adapters.rank())), inner = memory + 2 * m * hidden;
    auto normed = reinterpret_cast<Number *>(memory + m * hidden);
    norm_rows(s.take(h.in.x, hidden, 0, first, m, memory), w.norm, h.in.numbers->epsilon, normed, m, hidden);
    auto project = [&](const Number *weight, Input bias, const LowRank<Number> &adapter, Output target, int64_t size,
                       int64_t begin) {
      if (begin >= m) return;
      Output own = target + (first + begin) * size;
      gemm_rows('T', m - begin, size, hidden, 1, normed + begin * hidden, hidden, weight, hidden, 0, own, size);
      adapter.add(normed + begin * hidden, m - begin, hidden, own, size, inner);
      add_bias(bias, own, m - begin, size, size);
    };
    project(f.wk, w.wk_bias, h.adapters.k, out.key, h.key_width, 0);
    project(f.wv, w.wv_bias, h.adapters.v, out.value, h.key_width, 0);
    project(f.wq, w.wq_bias, h.adapters.q, out.query - s.skip * width, width, std::max<int64_t>(s.skip - first, 0));
    h.prepare_keys(out.key, first, m, out.ready);
  });
  if (h.in.numbers->asking == 0) {
    std::fill(out.y, out.y + arguments.shape(INDEX(AttentionInputs, asking))[0] * hidden, 0.0f);
    return 0;
  }
  attend(h.attention, out.query, out.ready, out.value, out.attended);
  s.zero_unused(out.y, hidden, s.all_skip);
  parallel_pieces(s.asking(), paired_piece<Number>(s.asking()), [&](int64_t first, int64_t m) {
    Output memory = scratch(m * (2 * hidden + 2 * h.adapters.rank() + width)), inner = memory + 2 * m * hidden,
           y = s.target(out.y, hidden, s.all_skip, s.skip + first, m, memory);
    if (h.in.numbers->residual) {
      Input x = s.take(h.in.x, hidden, 0, s.skip + first, m, memory + m * hidden);
      std::copy(x, x + m * hidden, y);
    }
    const Number *attended =
        factors(out.attended + first * width, m * width, reinterpret_cast<Number *>(inner + 2 * m * h.adapters.rank()));
    gemm_rows('T', m, hidden, width, 1, attended, width, f.wo, width, h.in.numbers->residual, y, hidden);
    h.adapters.o.add(attended, m, width, y, hidden, inner);
    s.put(y, hidden, s.all_skip, s.skip + first, m, out.y);
  });
  return 0;
}

// Computes the half's gradient. Inputs: as in `attention_half`; its outputs query (overwritten), key, value, attended; dy
// like y; gradient buffers of some weights, to which gradients are added. Outputs: dx [T, hidden], and memory for
// intermediate results.
template <typename Number>
int attention_half_gradient_of(void **params, int *ndims, int64_t **shapes) {
  struct Kept {
    Output query;
    Input key, value, attended, dy;
  };
  struct Outputs {
    Output dx, normed, d_attended, ready, d_key, d_value, packed;
  };
  Arguments arguments(params, ndims, shapes);
  const AttentionHalf<Number> h(arguments);
  const auto &w = h.weights;
  const auto &f = h.matrices;
  const auto kept = arguments.next<Kept>();
  const auto buffers = arguments.next<AttentionWeights, Output>(h.in.numbers->buffers).arrays;
  const auto out = arguments.next<Outputs>();
  const Sequences &s = h.sequences;
  const Attention &a = h.attention;
  const int64_t hidden = h.hidden, width = h.width, key_width = h.key_width, asking = s.asking(), d = a.d();
  const bool residual = h.in.numbers->residual;
  LowRankGradient<Number> q_map(h.adapters.q, asking), k_map(h.adapters.k, s.rows), v_map(h.adapters.v, s.rows);
  LowRankGradient<Number> o_map(h.adapters.o, asking);
  Input d_y = s.adjacent(s.skip, asking) ? s.take(kept.dy, hidden, s.all_skip, s.skip, asking, nullptr) : out.packed;
  const FactorRows<Number> attended(kept.attended, asking, width), d_output(d_y, asking, hidden);
  const FactorRows<Number> d_query(kept.query, asking, width);
  const FactorRows<Number> d_key(out.d_key, s.rows, key_width), d_value(out.d_value, s.rows, key_width);
  auto normed = reinterpret_cast<Number *>(out.normed);
  parallel_pieces(s.rows, paired_piece<Number>(s.rows),
                  [&](int64_t first, int64_t m) { h.prepare_keys(kept.key, first, m, out.ready); });
  parallel_pieces(asking, paired_piece<Number>(asking), [&](int64_t first, int64_t m) {
    Input own = s.take(kept.dy, hidden, s.all_skip, s.skip + first, m, out.packed + first * hidden);
    if (d_y == out.packed && own != d_y + first * hidden) std::copy(own, own + m * hidden, out.packed + first * hidden);
    Output d_attended = out.d_attended + first * width;
    const Number *slope = d_output.round(first, m);
    gemm_rows('N', m, width, hidden, 1, slope, hidden, f.wo, width, 0, d_attended, width);
    o_map.input(first, m, attended.round(first, m), width, 0, width, width);
    o_map.output(first, m, slope, hidden, 0, hidden);
    o_map.add(first, m, d_attended, width, 0, width, width);
  });
  std::vector<float> q_norms(w.q_norm ? s.prompts * a.heads * d : 0);
  attend_gradient(a, kept.query, out.ready, kept.value, out.d_attended, out.d_key, out.d_value,
                  w.q_norm ? q_norms.data() : nullptr);
  const int64_t parts = (s.rows + h.piece - 1) / h.piece;
  std::vector<float> norms(parts * hidden), k_norms(w.k_norm ? parts * d : 0);
  s.zero_unused(out.dx, hidden, 0);
  parallel_pieces(s.rows, h.piece, [&](int64_t first, int64_t m) {
    Output memory = scratch(3 * m * hidden + key_width), d_normed = memory + m * hidden;
    Output turned = d_normed + 2 * m * hidden;
    for (int64_t i = first; i < first + m; ++i) {
      Output own = out.d_key + i * key_width;
      a.turning.gradient(own, kept.key + i * key_width, w.k_norm, a.position(i), a.heads, own,
                         w.k_norm ? k_norms.data() + first / h.piece * d : nullptr, turned);
    }
    Input x = s.take(h.in.x, hidden, 0, first, m, memory);
    norm_rows(x, w.norm, h.in.numbers->epsilon, normed + first * hidden, m, hidden);
    // Computes a projection's part of d_normed for a piece's rows from `begin` on; row: their first index in slopes and map.
    auto back = [&](const FactorRows<Number> &slopes, const Number *weight, LowRankGradient<Number> &map, int64_t size,
                    int64_t begin, int64_t row, float keep) {
      Output own = d_normed + begin * hidden;
      const Number *slope = slopes.round(row, m - begin);
      gemm_rows('N', m - begin, hidden, size, 1, slope, size, weight, hidden, keep, own, hidden);
      map.input(row, m - begin, normed + (first + begin) * hidden, hidden, 0, hidden, hidden);
      map.output(row, m - begin, slope, size, 0, size);
      map.add(row, m - begin, own, hidden, 0, hidden, hidden);
    };
    back(d_key, f.wk, k_map, key_width, 0, first, 0);
    back(d_value, f.wv, v_map, key_width, 0, first, 1);
    const int64_t begin = std::clamp<int64_t>(s.skip - first, 0, m), at = first + begin - s.skip;
    back(d_query, f.wq, q_map, width, begin, at, 1);
    Output dx = s.target(out.dx, hidden, 0, first, m, d_normed + m * hidden);
    std::fill(dx, dx + (residual ? begin : m) * hidden, 0.0f);
    if (residual) std::copy(d_y + at * hidden, d_y + (at + m - begin) * hidden, dx + begin * hidden);
    norm_gradient_rows(d_normed, x, w.norm, h.in.numbers->epsilon, dx, norms.data() + first / h.piece * hidden, m, hidden,
                       true);
    s.put(dx, hidden, 0, first, m, out.dx);
  });
  const Number *normed_asking = normed + s.skip * hidden;
  weight_gradients<Number>({{asking, d_output.at(0), attended.at(0), buffers.wo, hidden, width},
                            {asking, d_query.at(0), normed_asking, buffers.wq, width, hidden},
                            {s.rows, d_key.at(0), normed, buffers.wk, key_width, hidden},
                            {s.rows, d_value.at(0), normed, buffers.wv, key_width, hidden},
                            o_map.of_a(attended.at(0), width, buffers.wo_a),
                            o_map.of_b(d_output.at(0), hidden, buffers.wo_b),
                            q_map.of_a(normed_asking, hidden, buffers.wq_a),
                            q_map.of_b(d_query.at(0), width, buffers.wq_b),
                            k_map.of_a(normed, hidden, buffers.wk_a),
                            k_map.of_b(d_key.at(0), key_width, buffers.wk_b),
                            v_map.of_a(normed, hidden, buffers.wv_a),
                            v_map.of_b(d_value.at(0), key_width, buffers.wv_b)});
  add_rows(kept.query, asking, width, buffers.wq_bias);
  add_rows(out.d_key, s.rows, key_width, buffers.wk_bias);
  add_rows(out.d_value, s.rows, key_width, buffers.wv_bias);
  add_rows(q_norms.data(), q_norms.size() / d, d, buffers.q_norm);
  add_rows(k_norms.data(), k_norms.size() / d, d, buffers.k_norm);
  add_rows(norms.data(), parts, hidden, buffers.norm);
  return 0;
}

}  // namespace

ENTRY_POINTS(attention_half)
ENTRY_POINTS(attention_half_gradient)
