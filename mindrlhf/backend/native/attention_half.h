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

// Returns the weights with wq, wk and wv as parts [out, in] of wq [3 * out, in], their biases and the rows of their adapters'
// B likewise, unless there is a wk. Adapters share A [rank, in].
template <typename Array>
AttentionWeights<Array> parted(AttentionWeights<Array> w, bool joined, int64_t out, int64_t in, int64_t rank) {
  auto after = [](Array array, int64_t numbers) { return array ? array + numbers : array; };
  if (!joined) return w;
  w.wk = after(w.wq, out * in), w.wv = after(w.wq, 2 * out * in);
  w.wk_bias = after(w.wq_bias, out), w.wv_bias = after(w.wq_bias, 2 * out);
  w.wk_a = w.wv_a = w.wq_a;
  w.wk_b = after(w.wq_b, out * rank), w.wv_b = after(w.wq_b, 2 * out * rank);
  return w;
}

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
  const bool joined;  // wq has the rows of wq, wk and wv
  int64_t hidden, width, key_width;
  const AttentionWeights<Input> weights;
  FactorMemory<Number> memory;
  const AttentionWeights<const Number *> matrices;
  AttentionAdapters<Number> adapters;
  Sequences sequences;
  Attention attention;
  int64_t piece;  // rows per piece

  explicit AttentionHalf(Arguments &arguments)
      : in(arguments.next<AttentionInputs>()),
        given(arguments.next<AttentionWeights, Input>(in.numbers->weights)),
        joined(!given.arrays.wk),
        hidden(arguments.shape(INDEX(AttentionInputs, x))[1]),
        width(given.shapes.wq[0] / (joined ? 3 : 1)),
        key_width(joined ? width : given.shapes.wk[0]),
        weights(parts_of(given.arrays)),
        memory(matrix_numbers(given)),
        matrices(parts_of(matrix_factors(given, memory.data()))),
        adapters(adapters_of(given, matrices)),
        sequences(*in.numbers, in.lengths, arguments.shape(INDEX(AttentionInputs, lengths))[0]),
        attention{sequences,
                  {in.cos, in.sin, in.numbers->head_size, in.numbers->epsilon},
                  in.positions,
                  weights.q_norm,
                  key_width / in.numbers->head_size,
                  width / key_width,
                  in.numbers->together,
                  in.numbers->scale},
        piece(summed_piece<Number>(sequences.rows)) {}
  AttentionHalf(const AttentionHalf &) = delete;

  template <typename Array>
  AttentionWeights<Array> parts_of(const AttentionWeights<Array> &all) const {
    return parted(all, joined, width, hidden, given.shapes.wq_a ? given.shapes.wq_a[0] : 0);
  }

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
    add_bias(w.wo_bias, y, m, hidden, hidden);
    s.put(y, hidden, s.all_skip, s.skip + first, m, out.y);
  });
  return 0;
}

// The gradient of the half. Inputs: as in `attention_half`; its outputs query (overwritten), key, value, attended; dy like y;
// gradient buffers of some weights, to which gradients are added. Outputs: dx [T, hidden], and memory for intermediate
// results.
template <typename Number>
class AttentionGradient {
 public:
  explicit AttentionGradient(Arguments &arguments)
      : h_(arguments),
        kept_(arguments.next<Kept>()),
        buffers_(h_.parts_of(arguments.next<AttentionWeights, Output>(h_.in.numbers->buffers).arrays)),
        out_(arguments.next<Outputs>()),
        s_(h_.sequences),
        hidden_(h_.hidden),
        width_(h_.width),
        key_width_(h_.key_width),
        asking_(s_.asking()),
        parts_((s_.rows + h_.piece - 1) / h_.piece),
        d_y_(s_.adjacent(s_.skip, asking_) ? s_.take(kept_.dy, hidden_, s_.all_skip, s_.skip, asking_, nullptr)
                                           : out_.packed),
        normed_(reinterpret_cast<Number *>(out_.normed)),
        q_map_(h_.adapters.q, asking_),
        k_map_(h_.adapters.k, s_.rows),
        v_map_(h_.adapters.v, s_.rows),
        o_map_(h_.adapters.o, asking_),
        attended_(kept_.attended, asking_, width_),
        d_output_(d_y_, asking_, hidden_),
        d_query_(kept_.query, asking_, width_),
        d_key_(out_.d_key, s_.rows, key_width_),
        d_value_(out_.d_value, s_.rows, key_width_),
        norms_(parts_ * hidden_),
        q_norms_(h_.weights.q_norm ? s_.prompts * h_.attention.heads * h_.attention.d() : 0),
        k_norms_(h_.weights.k_norm ? parts_ * h_.attention.d() : 0) {}
  AttentionGradient(const AttentionGradient &) = delete;

  void run() {
    parallel_pieces(s_.rows, paired_piece<Number>(s_.rows),
                    [&](int64_t first, int64_t m) { h_.prepare_keys(kept_.key, first, m, out_.ready); });
    parallel_pieces(asking_, paired_piece<Number>(asking_), [&](int64_t first, int64_t m) { through_output(first, m); });
    attend_gradient(h_.attention, kept_.query, out_.ready, kept_.value, out_.d_attended, out_.d_key, out_.d_value,
                    h_.weights.q_norm ? q_norms_.data() : nullptr);
    s_.zero_unused(out_.dx, hidden_, 0);
    parallel_pieces(s_.rows, h_.piece, [&](int64_t first, int64_t m) { through_projections(first, m); });
    add_to_buffers();
  }

 private:
  struct Kept {
    Output query;
    Input key, value, attended, dy;
  };
  struct Outputs {
    Output dx, normed, d_attended, ready, d_key, d_value, packed;
  };

  // Computes the gradient of m rows of attended values, from `first` on.
  void through_output(int64_t first, int64_t m) {
    Input own = s_.take(kept_.dy, hidden_, s_.all_skip, s_.skip + first, m, out_.packed + first * hidden_);
    if (d_y_ == out_.packed && own != d_y_ + first * hidden_) {
      std::copy(own, own + m * hidden_, out_.packed + first * hidden_);
    }
    Output d_attended = out_.d_attended + first * width_;
    const Number *slope = d_output_.round(first, m);
    gemm_rows('N', m, width_, hidden_, 1, slope, hidden_, h_.matrices.wo, width_, 0, d_attended, width_);
    o_map_.input(first, m, attended_.round(first, m), width_, 0, width_, width_);
    o_map_.output(first, m, slope, hidden_, 0, hidden_);
    o_map_.add(first, m, d_attended, width_, 0, width_, width_);
  }

  // Computes dx of a piece of m rows, from `first` on.
  void through_projections(int64_t first, int64_t m) {
    Output memory = scratch(3 * m * hidden_ + key_width_), d_normed = memory + m * hidden_;
    turn_keys(first, m, d_normed + 2 * m * hidden_);
    Input x = s_.take(h_.in.x, hidden_, 0, first, m, memory);
    norm_rows(x, h_.weights.norm, h_.in.numbers->epsilon, normed_ + first * hidden_, m, hidden_);
    const int64_t begin = std::clamp<int64_t>(s_.skip - first, 0, m), at = first + begin - s_.skip;
    through(d_key_, h_.matrices.wk, k_map_, key_width_, first, m, 0, first, 0, d_normed);
    through(d_value_, h_.matrices.wv, v_map_, key_width_, first, m, 0, first, 1, d_normed);
    through(d_query_, h_.matrices.wq, q_map_, width_, first, m, begin, at, 1, d_normed);
    const bool residual = h_.in.numbers->residual;
    Output dx = s_.target(out_.dx, hidden_, 0, first, m, d_normed + m * hidden_);
    std::fill(dx, dx + (residual ? begin : m) * hidden_, 0.0f);
    if (residual) std::copy(d_y_ + at * hidden_, d_y_ + (at + m - begin) * hidden_, dx + begin * hidden_);
    norm_gradient_rows(d_normed, x, h_.weights.norm, h_.in.numbers->epsilon, dx,
                       norms_.data() + first / h_.piece * hidden_, m, hidden_, true);
    s_.put(dx, hidden_, 0, first, m, out_.dx);
  }

  // Turns the gradients of m rows of keys back to those of the projection's results.
  void turn_keys(int64_t first, int64_t m, Output memory) {
    const Attention &a = h_.attention;
    Input norm = h_.weights.k_norm;
    for (int64_t i = first; i < first + m; ++i) {
      Output own = out_.d_key + i * key_width_;
      a.turning.gradient(own, kept_.key + i * key_width_, norm, a.position(i), a.heads, own,
                         norm ? k_norms_.data() + first / h_.piece * a.d() : nullptr, memory);
    }
  }

  // Computes a projection's part of d_normed for a piece's rows from `begin` on. row: their first index in slopes and map.
  void through(const FactorRows<Number> &slopes, const Number *weight, LowRankGradient<Number> &map, int64_t size,
               int64_t first, int64_t m, int64_t begin, int64_t row, float keep, Output d_normed) {
    Output own = d_normed + begin * hidden_;
    const Number *slope = slopes.round(row, m - begin);
    gemm_rows('N', m - begin, hidden_, size, 1, slope, size, weight, hidden_, keep, own, hidden_);
    map.input(row, m - begin, normed_ + (first + begin) * hidden_, hidden_, 0, hidden_, hidden_);
    map.output(row, m - begin, slope, size, 0, size);
    map.add(row, m - begin, own, hidden_, 0, hidden_, hidden_);
  }

  // Adds the gradients of weights, biases and norms.
  void add_to_buffers() {
    const Number *normed_asking = normed_ + s_.skip * hidden_;
    weight_gradients<Number>({{asking_, d_output_.at(0), attended_.at(0), buffers_.wo, hidden_, width_},
                              {asking_, d_query_.at(0), normed_asking, buffers_.wq, width_, hidden_},
                              {s_.rows, d_key_.at(0), normed_, buffers_.wk, key_width_, hidden_},
                              {s_.rows, d_value_.at(0), normed_, buffers_.wv, key_width_, hidden_},
                              o_map_.of_a(attended_.at(0), width_, buffers_.wo_a),
                              o_map_.of_b(d_output_.at(0), hidden_, buffers_.wo_b),
                              q_map_.of_a(normed_asking, hidden_, buffers_.wq_a),
                              q_map_.of_b(d_query_.at(0), width_, buffers_.wq_b),
                              k_map_.of_a(normed_, hidden_, h_.joined ? nullptr : buffers_.wk_a),
                              k_map_.of_b(d_key_.at(0), key_width_, buffers_.wk_b),
                              v_map_.of_a(normed_, hidden_, h_.joined ? nullptr : buffers_.wv_a),
                              v_map_.of_b(d_value_.at(0), key_width_, buffers_.wv_b)});
    if (h_.joined) {  // one A: each call adds to the same buffer
      weight_gradients<Number>({k_map_.of_a(normed_, hidden_, buffers_.wk_a)});
      weight_gradients<Number>({v_map_.of_a(normed_, hidden_, buffers_.wv_a)});
    }
    const int64_t d = h_.attention.d();
    add_rows(d_y_, asking_, hidden_, buffers_.wo_bias);
    add_rows(kept_.query, asking_, width_, buffers_.wq_bias);
    add_rows(out_.d_key, s_.rows, key_width_, buffers_.wk_bias);
    add_rows(out_.d_value, s_.rows, key_width_, buffers_.wv_bias);
    add_rows(q_norms_.data(), q_norms_.size() / d, d, buffers_.q_norm);
    add_rows(k_norms_.data(), k_norms_.size() / d, d, buffers_.k_norm);
    add_rows(norms_.data(), parts_, hidden_, buffers_.norm);
  }

  const AttentionHalf<Number> h_;
  const Kept kept_;
  const AttentionWeights<Output> buffers_;
  const Outputs out_;
  const Sequences &s_;
  const int64_t hidden_, width_, key_width_, asking_, parts_;
  Input d_y_;
  Number *const normed_;
  LowRankGradient<Number> q_map_, k_map_, v_map_, o_map_;
  const FactorRows<Number> attended_, d_output_, d_query_, d_key_, d_value_;
  std::vector<float> norms_, q_norms_, k_norms_;  // gradients of norms, of each piece or prompt
};

template <typename Number>
int attention_half_gradient_of(void **params, int *ndims, int64_t **shapes) {
  Arguments arguments(params, ndims, shapes);
  AttentionGradient<Number>(arguments).run();
  return 0;
}

// The same for blocks of a vision tower, whose prompts are windows of images (`HalfNumbers`, together); wq is [3 * width,
// hidden], so that the outputs have other shapes.
template <typename Number>
int image_attention_half_of(void **params, int *ndims, int64_t **shapes) {
  return attention_half_of<Number>(params, ndims, shapes);
}
template <typename Number>
int image_attention_half_gradient_of(void **params, int *ndims, int64_t **shapes) {
  return attention_half_gradient_of<Number>(params, ndims, shapes);
}

}  // namespace

ENTRY_POINTS(attention_half)
ENTRY_POINTS(attention_half_gradient)
ENTRY_POINTS(image_attention_half)
ENTRY_POINTS(image_attention_half_gradient)
