// Log-probs of tokens from the model's head, and their gradient.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "factors.h"
#include "lanes.h"
#include "matrix.h"
#include "team.h"

namespace {

// The first inputs of both operators below. Only used tokens are computed; their logits are stored without gaps.
struct TokenHead {
  enum { HIDDEN, HEAD, TARGETS, USED, INVERSE, END };
  int64_t tokens, hidden, vocabulary;
  const int32_t *targets;
  float inverse;
  std::vector<int64_t> given;  // the token index of each used token
  const float *rows;           // hidden states of used tokens [used, hidden]

  TokenHead(void **params, int64_t **shapes) {
    const float *all = static_cast<const float *>(params[HIDDEN]);
    const int32_t *used = static_cast<const int32_t *>(params[USED]);
    tokens = shapes[HIDDEN][0], hidden = shapes[HIDDEN][1], vocabulary = shapes[HEAD][0];
    targets = static_cast<const int32_t *>(params[TARGETS]), inverse = *static_cast<const float *>(params[INVERSE]);
    for (int64_t i = 0; i < tokens; ++i) {
      if (used[i]) given.push_back(i);
    }
    rows = all;
    if (count() < tokens) {
      thread_local std::vector<float> gathered;
      gathered.resize(count() * hidden);
      for (int64_t i = 0; i < count(); ++i) {
        std::copy(all + given[i] * hidden, all + (given[i] + 1) * hidden, gathered.data() + i * hidden);
      }
      rows = gathered.data();
    }
  }
  int64_t count() const { return given.size(); }
};

// The hidden states of used tokens, and the head, as factors.
template <typename Number>
struct HeadFactors {
  FactorMemory<Number> of_rows, of_head;
  const Number *rows, *head;

  HeadFactors(const TokenHead &h, Input weight)
      : of_rows(h.count() * h.hidden),
        of_head(h.vocabulary * h.hidden),
        rows(all_factors(h.rows, h.count() * h.hidden, of_rows.data())),
        head(all_factors(weight, h.vocabulary * h.hidden, of_head.data())) {}
};

// Computes log-probs: hidden [T, H], head [V, H], targets, used int32[T], inverse temperature [1] -> log_probs, entropy, log
// of the partition sum, [T] each, 0 for unused tokens; and logits [T, V], where the used tokens come first without gaps.
template <typename Number>
int token_log_probs_of(void **params, int *, int64_t **shapes) {
  using H = TokenHead;
  const H h(params, shapes);
  const HeadFactors<Number> f(h, static_cast<Input>(params[H::HEAD]));
  auto p = reinterpret_cast<float **>(params);
  float **out = p + H::END, *logits = out[3];
  for (int i = 0; i < 3; ++i) std::fill(out[i], out[i] + h.tokens, 0.0f);
  auto statistics = [&](int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) {
      const float *x = logits + i * h.vocabulary;
      const float top = largest(x, h.vocabulary) * h.inverse;
      float *e = scratch(h.vocabulary);
      const float inverse = h.inverse;
      const int64_t n = h.vocabulary;
      const float total = sum_over(n, [=](int64_t j) INLINE { return e[j] = exponential(x[j] * inverse - top); });
      const float weighted = sum_over(n, [=](int64_t j) INLINE { return e[j] * (x[j] * inverse - top); });
      const float log_total = std::log(total);
      const int64_t token = h.given[i];
      out[0][token] = x[h.targets[token]] * h.inverse - top - log_total;
      out[1][token] = log_total - weighted / total;
      out[2][token] = log_total + top;
    }
  };
  if (h.count() >= 2 * kRows) {  // statistics follow while the logits are in the cache
    parallel_pieces(h.count(), paired_piece<Number>(h.count()), [&](int64_t i, int64_t m) {
      gemm_rows('T', m, h.vocabulary, h.hidden, 1, f.rows + i * h.hidden, h.hidden, f.head, h.hidden, 0,
                logits + i * h.vocabulary, h.vocabulary);
      statistics(i, m);
    });
  } else {
    linear_rows(f.rows, f.head, logits, h.count(), h.hidden, h.vocabulary);
    parallel_pieces(h.count(), 16, statistics);
  }
  return 0;
}

// Computes the gradient: inputs of `token_log_probs`; its outputs except log_probs (logits overwritten); d_log_prob,
// d_entropy; a buffer [V, H] to add the head's gradient to, or any array of one dimension for none -> d_hidden [T, H].
template <typename Number>
int token_log_probs_gradient_of(void **params, int *ndims, int64_t **shapes) {
  using H = TokenHead;
  const H h(params, shapes);
  const HeadFactors<Number> f(h, static_cast<Input>(params[H::HEAD]));
  const int64_t apart = h.vocabulary * sizeof(float) / sizeof(Number);  // factors are stored in place of their logits
  enum { ENTROPY = H::END, LOG_TOTAL, LOGITS, D_LOG_PROB, D_ENTROPY, BUFFER, D_HIDDEN };
  auto p = reinterpret_cast<float **>(params);
  float *logits = p[LOGITS], *d_hidden = p[D_HIDDEN];
  auto d_logits = reinterpret_cast<Number *>(logits);
  parallel_pieces(h.count(), paired_piece<Number>(h.count()), [&](int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) {
      float *x = logits + i * h.vocabulary, *slope = std::is_same_v<Number, float> ? x : scratch(h.vocabulary);
      const int64_t token = h.given[i];
      const float entropy = p[ENTROPY][token], log_total = p[LOG_TOTAL][token];
      const float d_log_prob = p[D_LOG_PROB][token], d_entropy = p[D_ENTROPY][token];
#pragma omp simd
      for (int64_t j = 0; j < h.vocabulary; ++j) {
        const float log_prob = x[j] * h.inverse - log_total;
        slope[j] = -exponential(log_prob) * (d_log_prob + d_entropy * (log_prob + entropy)) * h.inverse;
      }
      slope[h.targets[token]] += d_log_prob * h.inverse;
      factors(slope, h.vocabulary, reinterpret_cast<Number *>(x));
    }
    gemm_rows('N', m, h.hidden, h.vocabulary, 1, d_logits + first * apart, apart, f.head, h.hidden, 0,
              d_hidden + first * h.hidden, h.hidden);
  });
  int64_t end = h.tokens;  // moves the rows to their token's place, the last row first
  for (int64_t i = h.count() - 1; i >= 0; end = h.given[i], --i) {
    const int64_t token = h.given[i];
    std::fill(d_hidden + (token + 1) * h.hidden, d_hidden + end * h.hidden, 0.0f);
    if (token > i) std::copy(d_hidden + i * h.hidden, d_hidden + (i + 1) * h.hidden, d_hidden + token * h.hidden);
  }
  std::fill(d_hidden, d_hidden + end * h.hidden, 0.0f);
  float *buffer = ndims[BUFFER] == 2 ? p[BUFFER] : nullptr;
  weight_gradients<Number>({{h.count(), d_logits, f.rows, buffer, h.vocabulary, h.hidden, apart}});
  return 0;
}

}  // namespace

ENTRY_POINTS(token_log_probs)
ENTRY_POINTS(token_log_probs_gradient)
