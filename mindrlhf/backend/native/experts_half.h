// The experts of a feed-forward half and their gradient: y = sum of share * w2(silu(w1(x)) * w3(x)) over a row's experts.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "factors.h"
#include "lanes.h"
#include "low_rank.h"
#include "matrix.h"
#include "names.h"
#include "team.h"

namespace {

// The first inputs of both operators below; the weights follow, each [experts, ...]. x [rows, hidden]; chosen int32[rows, k]:
// experts, or their number where a row has no choice; shares [rows, k].
struct ExpertInputs {
  Input x;
  const int32_t *chosen;
  Input shares;
  const ExpertNumbers *numbers;
};

// Some rows of one expert, counted among all choices when these are sorted by expert.
struct ExpertPiece {
  int64_t expert, first, size;
};

// The choices of experts, sorted by expert and then by row.
struct Choices {
  int64_t rows, each;
  std::vector<int64_t> starts;   // [experts + 1]: the first sorted choice of each expert
  std::vector<int64_t> sources;  // the choice, row * each + i, at each sorted place
  std::vector<int64_t> places;   // the sorted place of each choice; -1 without an expert

  Choices(const int32_t *chosen, int64_t rows, int64_t each, int64_t experts)
      : rows(rows), each(each), starts(experts + 1), places(rows * each, -1) {
    auto known = [=](int64_t i) { return chosen[i] >= 0 && chosen[i] < experts; };
    for (int64_t i = 0; i < rows * each; ++i) {
      if (known(i)) ++starts[chosen[i] + 1];
    }
    for (int64_t e = 0; e < experts; ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    sources.resize(starts.back());
    for (int64_t i = 0; i < rows * each; ++i) {
      if (known(i)) sources[places[i] = next[chosen[i]]++] = i;
    }
  }

  int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }

  // Cuts each expert's choices into pieces of at most `most`.
  std::vector<ExpertPiece> pieces(int64_t most) const {
    std::vector<ExpertPiece> found;
    for (size_t e = 0; e + 1 < starts.size(); ++e) {
      const int64_t step = even_rows(even_piece(count(e), most));
      for (int64_t i = starts[e]; i < starts[e + 1]; i += step) {
        found.push_back({static_cast<int64_t>(e), i, std::min(step, starts[e + 1] - i)});
      }
    }
    return found;
  }

  // Copies to y the rows of x that m choices from sorted place `first` on have.
  template <typename Number>
  void take(Input x, int64_t width, int64_t first, int64_t m, Number *y) const {
    for (int64_t i = 0; i < m; ++i) round_numbers(x + sources[first + i] / each * width, width, y + i * width);
  }

  // Sums the rows of x, in sorted places, that each row has: y [rows, width]. shares: of the choices; null: 1.
  void sum(Input x, int64_t width, Input shares, Output y) const {
    parallel_pieces(rows, kRows, [&](int64_t begin, int64_t m) {
      for (int64_t row = begin; row < begin + m; ++row) {
        Output own = y + row * width;
        std::fill(own, own + width, 0.0f);
        for (int64_t i = row * each; i < (row + 1) * each; ++i) {
          if (places[i] < 0) continue;
          const float share = shares ? shares[i] : 1.0f;
          Input from = x + places[i] * width;
#pragma omp simd
          for (int64_t c = 0; c < width; ++c) own[c] += share * from[c];
        }
      }
    });
  }
};

// The inputs and sizes of both operators.
template <typename Number>
struct Experts {
  ExpertInputs in;
  Given<FeedForwardWeights, Input> given;
  FactorMemory<Number> memory;
  const FeedForwardWeights<const Number *> matrices;
  int64_t hidden, inner;
  Choices choices;

  explicit Experts(Arguments &arguments)
      : in(arguments.next<ExpertInputs>()),
        given(arguments.next<FeedForwardWeights, Input>(in.numbers->weights)),
        memory(matrix_numbers(given)),
        matrices(matrix_factors(given, memory.data())),
        hidden(arguments.shape(INDEX(ExpertInputs, x))[1]),
        inner(given.shapes.w1[1]),
        choices(in.chosen, arguments.shape(INDEX(ExpertInputs, chosen))[0], arguments.shape(INDEX(ExpertInputs, chosen))[1],
                given.shapes.w1[0]) {}
  Experts(const Experts &) = delete;

  int64_t count() const { return given.shapes.w1[0]; }

  // Return one expert's matrix of a map, or its part of a buffer; null if there is none.
  template <typename T>
  T *of(T *all, int64_t expert) const {
    return all ? all + expert * hidden * inner : nullptr;
  }
  template <typename T>
  T *low(T *all, Shape shape, int64_t expert) const {
    return all ? all + expert * shape[1] * shape[2] : nullptr;
  }

  FeedForwardAdapters<Number> adapters(int64_t expert) const {
    const auto &s = given.shapes;
    const Input scales = given.arrays.scales;
    auto one = [&](const Number *a, const Number *b, Shape a_shape, Shape b_shape, int index) {
      return a ? LowRank<Number>{low(a, a_shape, expert), low(b, b_shape, expert), scales[index], a_shape[1]}
               : LowRank<Number>{};
    };
    return {one(matrices.w1_a, matrices.w1_b, s.w1_a, s.w1_b, 0), one(matrices.w3_a, matrices.w3_b, s.w3_a, s.w3_b, 1),
            one(matrices.w2_a, matrices.w2_b, s.w2_a, s.w2_b, 2)};
  }
};

// Computes the experts. Outputs: y like x; in sorted places gate and up [rows * k, inner], and memory [rows * k, hidden].
template <typename Number>
int experts_half_of(void **params, int *ndims, int64_t **shapes) {
  struct Outputs {
    Output y, gate, up, made;
  };
  Arguments arguments(params, ndims, shapes);
  const Experts<Number> h(arguments);
  const auto out = arguments.next<Outputs>();
  const int64_t hidden = h.hidden, inner = h.inner;
  const auto pieces = h.choices.pieces(kPairRows<Number>);
  parallel_pieces(pieces.size(), 1, [&](int64_t i, int64_t) {
    const auto [expert, first, m] = pieces[i];
    const auto adapters = h.adapters(expert);
    Output memory = scratch(m * (hidden + inner + 2 * adapters.rank())), near = memory + m * hidden, low = near + m * inner;
    auto x = reinterpret_cast<Number *>(memory), act = reinterpret_cast<Number *>(near);
    Output gate = out.gate + first * inner, up = out.up + first * inner, y = out.made + first * hidden;
    h.choices.take(h.in.x, hidden, first, m, x);
    gemm_rows('T', m, inner, hidden, 1, x, hidden, h.of(h.matrices.w1, expert), hidden, 0, gate, inner);
    gemm_rows('T', m, inner, hidden, 1, x, hidden, h.of(h.matrices.w3, expert), hidden, 0, up, inner);
    adapters.gate.add(x, m, hidden, gate, inner, low);
    adapters.up.add(x, m, hidden, up, inner, low);
    gated(gate, up, act, m * inner);
    gemm_rows('T', m, hidden, inner, 1, act, inner, h.of(h.matrices.w2, expert), inner, 0, y, hidden);
    adapters.down.add(act, m, inner, y, hidden, low);
  });
  h.choices.sum(out.made, hidden, h.in.shares, out.y);
  return 0;
}

// The gradient of the experts. Inputs: as in `experts_half`; its outputs gate and up (overwritten); dy like x; gradient
// buffers of some weights, to which gradients are added. Outputs: dx like x, d_shares [rows, k], and memory [rows * k, ...].
template <typename Number>
class ExpertsGradient {
 public:
  explicit ExpertsGradient(Arguments &arguments)
      : h_(arguments),
        kept_(arguments.next<Kept>()),
        buffers_(arguments.next<FeedForwardWeights, Output>(h_.in.numbers->buffers).arrays),
        out_(arguments.next<Outputs>()),
        hidden_(h_.hidden),
        inner_(h_.inner),
        x_(reinterpret_cast<Number *>(out_.x)),
        d_y_(reinterpret_cast<Number *>(out_.d_y)),
        act_(reinterpret_cast<Number *>(out_.act)),
        d_gate_(kept_.gate, h_.choices.sources.size(), inner_),
        d_up_(kept_.up, h_.choices.sources.size(), inner_) {
    for (int64_t e = 0; e < h_.count(); ++e) {
      const auto adapters = h_.adapters(e);
      for (const auto *one : {&adapters.gate, &adapters.up, &adapters.down}) {
        maps_.emplace_back(std::make_unique<LowRankGradient<Number>>(*one, h_.choices.count(e)));
      }
    }
  }
  ExpertsGradient(const ExpertsGradient &) = delete;

  void run() {
    const int64_t choices = h_.choices.rows * h_.choices.each;
    std::fill(out_.d_shares, out_.d_shares + choices, 0.0f);
    const auto pieces = h_.choices.pieces(kPairRows<Number>);
    parallel_pieces(pieces.size(), 1, [&](int64_t i, int64_t) { compute(pieces[i]); });
    h_.choices.sum(out_.d_x_rows, hidden_, nullptr, out_.dx);
    add_to_buffers();
  }

 private:
  struct Kept {
    Output gate, up;
    Input dy;
  };
  struct Outputs {
    Output dx, d_shares, x, d_y, act, d_x_rows;
  };
  enum { GATE, UP, DOWN, MAPS };

  LowRankGradient<Number> &map(int64_t expert, int which) const { return *maps_[expert * MAPS + which]; }

  // Computes d_shares and the gradients of the rows of one piece.
  void compute(const ExpertPiece &piece) {
    const auto [expert, first, m] = piece;
    const int64_t own = first - h_.choices.starts[expert];  // among the expert's rows
    Output slope = scratch(m * inner_ + inner_), products = slope + m * inner_;
    Number *x = x_ + first * hidden_, *d_y = d_y_ + first * hidden_, *act = act_ + first * inner_;
    Number *gate = d_gate_.at(first), *up = d_up_.at(first);
    Output d_x = out_.d_x_rows + first * hidden_;
    h_.choices.take(h_.in.x, hidden_, first, m, x);
    h_.choices.take(kept_.dy, hidden_, first, m, d_y);
    gemm_rows('N', m, inner_, hidden_, 1, d_y, hidden_, h_.of(h_.matrices.w2, expert), inner_, 0, slope, inner_);
    map(expert, DOWN).output(own, m, d_y, hidden_, 0, hidden_);
    map(expert, DOWN).add(own, m, slope, inner_, 0, inner_, inner_);
    for (int64_t i = 0; i < m; ++i) {
      through_gate(h_.choices.sources[first + i], slope + i * inner_, kept_.gate + (first + i) * inner_,
                   kept_.up + (first + i) * inner_, products, act + i * inner_, gate + i * inner_, up + i * inner_);
    }
    map(expert, DOWN).input(own, m, act, inner_, 0, inner_, inner_);
    map(expert, GATE).input(own, m, x, hidden_, 0, hidden_, hidden_);
    map(expert, UP).input(own, m, x, hidden_, 0, hidden_, hidden_);
    map(expert, GATE).output(own, m, gate, inner_, 0, inner_);
    map(expert, UP).output(own, m, up, inner_, 0, inner_);
    gemm_rows('N', m, hidden_, inner_, 1, gate, inner_, h_.of(h_.matrices.w1, expert), hidden_, 0, d_x, hidden_);
    gemm_rows('N', m, hidden_, inner_, 1, up, inner_, h_.of(h_.matrices.w3, expert), hidden_, 1, d_x, hidden_);
    map(expert, GATE).add(own, m, d_x, hidden_, 0, hidden_, hidden_);
    map(expert, UP).add(own, m, d_x, hidden_, 0, hidden_, hidden_);
  }

  // Computes one row's gradients at gate and up from `slope`, the gradient at the product of both for a share of 1; and
  // the product times the share, for the gradient of w2.
  void through_gate(int64_t choice, Output slope, Input gate, Input up, Output product, Number *act, Number *d_gate,
                    Number *d_up) const {
    const float share = h_.in.shares[choice];
    gated(gate, up, product, inner_);
    float total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t c = 0; c < inner_; ++c) total += slope[c] * product[c];
    out_.d_shares[choice] = total;
    fill(act, inner_, [=](int64_t c) INLINE { return share * product[c]; });
#pragma omp simd
    for (int64_t c = 0; c < inner_; ++c) slope[c] *= share;
    gated_gradient(slope, gate, up, d_gate, d_up, inner_);
  }

  void add_to_buffers() {
    const auto &b = buffers_;
    const auto &s = h_.given.shapes;
    std::vector<WeightGradient<Number>> list;
    for (int64_t e = 0; e < h_.count(); ++e) {
      const int64_t first = h_.choices.starts[e], m = h_.choices.count(e);
      if (m == 0) continue;
      const Number *x = x_ + first * hidden_, *act = act_ + first * inner_, *d_y = d_y_ + first * hidden_;
      const Number *gate = d_gate_.at(first), *up = d_up_.at(first);
      list.push_back({m, d_y, act, h_.of(b.w2, e), hidden_, inner_});
      list.push_back({m, gate, x, h_.of(b.w1, e), inner_, hidden_});
      list.push_back({m, up, x, h_.of(b.w3, e), inner_, hidden_});
      if (b.w2_a) list.push_back(map(e, DOWN).of_a(act, inner_, h_.low(b.w2_a, s.w2_a, e)));
      if (b.w2_b) list.push_back(map(e, DOWN).of_b(d_y, hidden_, h_.low(b.w2_b, s.w2_b, e)));
      if (b.w1_a) list.push_back(map(e, GATE).of_a(x, hidden_, h_.low(b.w1_a, s.w1_a, e)));
      if (b.w1_b) list.push_back(map(e, GATE).of_b(gate, inner_, h_.low(b.w1_b, s.w1_b, e)));
      if (b.w3_a) list.push_back(map(e, UP).of_a(x, hidden_, h_.low(b.w3_a, s.w3_a, e)));
      if (b.w3_b) list.push_back(map(e, UP).of_b(up, inner_, h_.low(b.w3_b, s.w3_b, e)));
    }
    weight_gradients<Number>(list);
  }

  const Experts<Number> h_;
  const Kept kept_;
  const FeedForwardWeights<Output> buffers_;
  const Outputs out_;
  const int64_t hidden_, inner_;
  Number *const x_, *const d_y_, *const act_;
  const FactorRows<Number, Output> d_gate_, d_up_;
  std::vector<std::unique_ptr<LowRankGradient<Number>>> maps_;  // of each expert: gate, up, down
};

template <typename Number>
int experts_half_gradient_of(void **params, int *ndims, int64_t **shapes) {
  Arguments arguments(params, ndims, shapes);
  ExpertsGradient<Number>(arguments).run();
  return 0;
}

}  // namespace

ENTRY_POINTS(experts_half)
ENTRY_POINTS(experts_half_gradient)
