// Attention of prompts and of their completions in training and scoring.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "matrix.h"
#include "team.h"

namespace {

const int64_t kQueryRows = 64;  // rows of scores held at once

// Rows of a prompt or of a completion: its first row among keys, how many of them count, and how many it has.
struct Span {
  int64_t at, size, room;
};

struct Attention {
  // prompts, samples of each; heads of keys, of queries for each, size; longest prompt and completion
  int64_t n, g, heads, queries, d, p, r;
  std::vector<Span> far, near;  // [n], [n * g]
  int64_t rows;                 // of keys
  int64_t skip;                 // those of them before the first that asks: all prompts, or none
  float scale;

  int64_t width() const { return heads * queries * d; }
  int64_t key_width() const { return heads * d; }
  int64_t scratch_size() const { return 2 * kQueryRows * (p + r); }

  // body(span) for all, in the order of their rows.
  template <typename Body>
  void spans(Body body) const {
    for (const Span &span : far) body(span);
    for (const Span &span : near) body(span);
  }
};

// A block of queries of one head: which rows they are, and which keys they see: `far` of the prompt, then of `near`
// rows as many as their own position. `first`: the position of the block's first row within its sequence.
struct Block {
  int64_t query, rows, far_key, far, near_key, near, first;
};

template <typename Body>
void blocks(const Attention &a, int64_t i, Body body) {
  auto cut = [&](const Span &span, const Span &before) {
    for (int64_t first = 0; first < span.size; first += kQueryRows) {
      const int64_t rows = std::min(kQueryRows, span.size - first);
      body(Block{span.at + first - a.skip, rows, before.at, before.size, span.at, first + rows, first});
    }
  };
  if (!a.skip) cut(a.far[i], Span{0, 0, 0});
  for (int64_t s = 0; s < a.g; ++s) cut(a.near[i * a.g + s], a.far[i]);
}

// weights [rows, far + near] of a block: the softmax over what each row sees, zeros elsewhere.
void block_weights(const Attention &a, const Block &b, const float *query, const float *key, int64_t head,
                   float *weights) {
  const int64_t size = b.far + b.near, width = a.key_width();
  const float *q = query + b.query * a.width();
  gemm('N', 'T', b.rows, b.far, a.d, a.scale, q, a.width(), key + b.far_key * width + head * a.d, width, 0, weights,
       size);
  gemm('N', 'T', b.rows, b.near, a.d, a.scale, q, a.width(), key + b.near_key * width + head * a.d, width, 0,
       weights + b.far, size);
  for (int64_t row = 0; row < b.rows; ++row) {
    const int64_t seen = b.far + b.first + row + 1;
    softmax(weights + row * size, seen);
    std::fill(weights + row * size + seen, weights + (row + 1) * size, 0.0f);
  }
}

// Of rows of queries, those that do not count.
void zero_unused(const Attention &a, float *rows, int64_t width) {
  a.spans([&](const Span &span) {
    if (span.at >= a.skip) {
      float *own = rows + (span.at - a.skip) * width;
      std::fill(own + span.size * width, own + span.room * width, 0.0f);
    }
  });
}

// output of attention, like query
void attend(const Attention &a, const float *query, const float *key, const float *value, float *output) {
  zero_unused(a, output, a.width());
  pieces(a.n * a.heads * a.queries, 1, [&](int64_t task, int64_t) {
    const int64_t i = task / (a.heads * a.queries), h = task % (a.heads * a.queries), head = h / a.queries;
    float *weights = scratch(a.scratch_size());
    const float *own = query + h * a.d;
    blocks(a, i, [&](const Block &b) {
      block_weights(a, b, own, key, head, weights);
      const int64_t size = b.far + b.near, width = a.key_width();
      float *out = output + b.query * a.width() + h * a.d;
      gemm('N', 'N', b.rows, a.d, b.near, 1, weights + b.far, size, value + b.near_key * width + head * a.d, width, 0,
           out, a.width());
      if (b.far) {
        gemm('N', 'N', b.rows, a.d, b.far, 1, weights, size, value + b.far_key * width + head * a.d, width, 1, out,
             a.width());
      }
    });
  });
}

// gradients of query, key and value from that of the output
void attend_gradient(const Attention &a, const float *query, const float *key, const float *value,
                     const float *d_output, float *d_query, float *d_key, float *d_value) {
  const int64_t width = a.key_width();
  std::fill(d_key, d_key + a.rows * width, 0.0f);
  std::fill(d_value, d_value + a.rows * width, 0.0f);
  zero_unused(a, d_query, a.width());
  pieces(a.n * a.heads, 1, [&](int64_t task, int64_t) {
    const int64_t i = task / a.heads, head = task % a.heads;
    float *weights = scratch(a.scratch_size());
    for (int64_t j = 0; j < a.queries; ++j) {
      const int64_t at = (head * a.queries + j) * a.d;
      blocks(a, i, [&](const Block &b) {
        block_weights(a, b, query + at, key, head, weights);
        const int64_t size = b.far + b.near;
        float *slopes = weights + b.rows * size;
        const float *d_out = d_output + b.query * a.width() + at, *q = query + b.query * a.width() + at;
        float *d_q = d_query + b.query * a.width() + at;
        struct Part {
          int64_t key, size, column;
        };
        const Part parts[2] = {{b.near_key, b.near, b.far}, {b.far_key, b.far, 0}};
        for (const Part &part : parts) {
          const int64_t offset = part.key * width + head * a.d;
          gemm('N', 'T', b.rows, part.size, a.d, 1, d_out, a.width(), value + offset, width, 0, slopes + part.column,
               size);
          if (part.size) {
            gemm('T', 'N', part.size, a.d, b.rows, 1, weights + part.column, size, d_out, a.width(), 1,
                 d_value + offset, width);
          }
        }
        for (int64_t row = 0; row < b.rows; ++row) {
          const float *w = weights + row * size;
          float *s = slopes + row * size;
          const float mean = sum_over(size, [=](int64_t c) { return w[c] * s[c]; });
#pragma omp simd
          for (int64_t c = 0; c < size; ++c) s[c] = w[c] * (s[c] - mean) * a.scale;
        }
        float keep = 0;
        for (const Part &part : parts) {
          if (!part.size) continue;
          const int64_t offset = part.key * width + head * a.d;
          gemm('N', 'N', b.rows, a.d, part.size, 1, slopes + part.column, size, key + offset, width, keep, d_q,
               a.width());
          gemm('T', 'N', part.size, a.d, b.rows, 1, slopes + part.column, size, q, a.width(), 1, d_key + offset,
               width);
          keep = 1;
        }
      });
    }
  });
}

// dims int32[6] = (p, g, r, heads, d, whether the prompts ask too), lengths int32[n * (1 + g)], of the prompts and then
// of the completions; width of all query heads. packed: rows that count lie without gaps.
Attention attention_from(const int32_t *dims, const int32_t *lengths, int64_t spans, int64_t width, float scale,
                         bool packed) {
  Attention a;
  a.p = dims[0], a.g = dims[1], a.r = dims[2], a.heads = dims[3], a.d = dims[4];
  a.n = spans / (1 + a.g);
  a.queries = width / (a.heads * a.d);
  a.scale = scale;
  a.rows = 0;
  auto place = [&](int64_t count, int64_t room, std::vector<Span> &into) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = std::min<int64_t>(std::max(*lengths++, 0), room);
      into.push_back({a.rows, size, packed ? size : room});
      a.rows += into.back().room;
    }
  };
  place(a.n, a.p, a.far);
  a.skip = dims[5] ? 0 : a.rows;
  place(a.n * a.g, a.r, a.near);
  return a;
}

// inputs: query, key, value, lengths, dims, scale
Attention attention_of(void **params, int64_t **shapes) {
  return attention_from(static_cast<const int32_t *>(params[4]), static_cast<const int32_t *>(params[3]), shapes[3][0],
                        shapes[0][1], *static_cast<const float *>(params[5]), false);
}

}  // namespace

extern "C" {

// (see attention_of) -> output like query
int attention(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  attend(attention_of(params, shapes), p[0], p[1], p[2], p[6]);
  return 0;
}

// (see attention_of), output gradient -> gradients of query, key and value
int attention_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  attend_gradient(attention_of(params, shapes), p[0], p[1], p[2], p[6], p[7], p[8], p[9]);
  return 0;
}

}  // extern "C"
