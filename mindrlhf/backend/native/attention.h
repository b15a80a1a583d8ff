// Attention of prompts to themselves, of completions to their shared prompt and to themselves, and of windows of an image.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "lanes.h"
#include "matrix.h"
#include "names.h"
#include "team.h"

namespace {

const int64_t kQueryRows = 64;  // rows of scores in memory at once

// A range of rows: `size` rows, from row `at` on.
struct Span {
  int64_t at, size;
};

// N prompts of up to P positions, and for each prompt G completions of up to R: T = N * P + N * G * R padded rows. Padding
// is not computed: operators store all other rows without gaps, as unpadded rows. Asking rows: the rows of a half's output.
struct Sequences {
  int64_t prompts, samples;
  std::vector<Span> prompt, completion;  // [N], [N * G], of unpadded rows
  int64_t rows = 0;                      // number of unpadded rows
  int64_t skip;                          // unpadded rows before the first asking row
  int64_t all = 0, all_skip;             // rows and skip, counted in padded rows
  std::vector<int64_t> given;            // the padded row of each unpadded row
  std::vector<Span> unused;              // ranges of padding, in padded rows

  // lengths int32[N * (1 + G)]: of the prompts, then of the completions. spans: their number.
  Sequences(const HalfNumbers &numbers, const int32_t *lengths, int64_t spans) {
    samples = numbers.samples, prompts = spans / (1 + samples);
    given.reserve(prompts * (numbers.prefix + samples * numbers.completion));
    place(prompts, numbers.prefix, lengths, prompt);
    skip = numbers.asking == 2 ? 0 : rows, all_skip = numbers.asking == 2 ? 0 : all;
    place(prompts * samples, numbers.completion, lengths + prompts, completion);
    if (numbers.asking == 0) skip = rows, all_skip = all;
  }

  int64_t asking() const { return rows - skip; }

  // Returns m unpadded rows, from `first` on, of an array [.., width] whose first row is padded row `begin`: a pointer into
  // the array if they are adjacent, else a copy in `memory`.
  Input take(Input array, int64_t width, int64_t begin, int64_t first, int64_t m, Output memory) const {
    if (m == 0) return array;
    if (adjacent(first, m)) return array + (given[first] - begin) * width;
    for (int64_t i = 0; i < m; ++i) {
      Input row = array + (given[first + i] - begin) * width;
      std::copy(row, row + width, memory + i * width);
    }
    return memory;
  }

  // Returns where to write such rows: in the array if they are adjacent, else in `memory`, from which `put` copies them.
  Output target(Output array, int64_t width, int64_t begin, int64_t first, int64_t m, Output memory) const {
    return m && adjacent(first, m) ? array + (given[first] - begin) * width : memory;
  }
  void put(Input source, int64_t width, int64_t begin, int64_t first, int64_t m, Output array) const {
    if (adjacent(first, m)) return;
    for (int64_t i = 0; i < m; ++i) {
      std::copy(source + i * width, source + (i + 1) * width, array + (given[first + i] - begin) * width);
    }
  }

  void zero_unused(Output array, int64_t width, int64_t begin) const {
    for (const Span &span : unused) {
      Output row = array + (span.at - begin) * width;
      if (span.at >= begin) std::fill(row, row + span.size * width, 0.0f);
    }
  }

  bool adjacent(int64_t first, int64_t m) const { return m == 0 || given[first + m - 1] - given[first] == m - 1; }

 private:
  void place(int64_t count, int64_t room, const int32_t *lengths, std::vector<Span> &spans) {
    for (int64_t i = 0; i < count; ++i, all += room) {
      const int64_t size = std::min<int64_t>(std::max(lengths[i], 0), room);
      spans.push_back({rows, size});
      for (int64_t j = 0; j < size; ++j) given.push_back(all + j);
      if (size < room) unused.push_back({all + size, room - size});
      rows += size;
    }
  }
};

// Prepares heads of queries and keys for their product: a norm, if the model has one, and the rotation to their position.
// cos, sin [positions, d].
struct Heads {
  Input cos, sin;
  int64_t d;
  float epsilon;

  // Computes ready [heads, d] from raw [heads, d], which may be the same array; norm [d] or null.
  void prepare(Input raw, Input norm, int64_t position, int64_t heads, Output ready) const {
    if (norm) norm_rows(raw, norm, epsilon, ready, heads, d);
    turn(norm ? ready : raw, cos + position * d, sin + position * d, 1, ready, heads, d);
  }

  // Computes d_raw from d_ready, and adds the norm's gradient to d_norm [d]. d_raw may be the same array as d_ready or raw.
  void gradient(Input d_ready, Input raw, Input norm, int64_t position, int64_t heads, Output d_raw, Output d_norm,
                Output memory) const {
    Output turned = norm ? memory : d_raw;
    turn(d_ready, cos + position * d, sin + position * d, -1, turned, heads, d);
    if (norm) norm_gradient_rows(turned, raw, norm, epsilon, d_raw, d_norm, heads, d);
  }
};

// The attention of one layer over unpadded rows: `heads` key heads, and `queries` query heads for each, of size d.
struct Attention {
  const Sequences &sequences;
  Heads turning;
  const int32_t *positions;  // of the padded rows
  Input q_norm;              // [d] or null
  int64_t heads, queries;
  int64_t together;  // of `HalfNumbers`
  float scale;

  int64_t d() const { return turning.d; }
  int64_t width() const { return heads * queries * d(); }
  int64_t key_width() const { return heads * d(); }
  int64_t position(int64_t row) const { return positions[sequences.given[row]]; }
  // Sequences with keys of their own: prompts, each with its completions, or some prompts together.
  int64_t runs() const { return sequences.prompts / std::max<int64_t>(together, 1); }
  Span run(int64_t i) const {
    if (!together) return sequences.prompt[i];
    Span all{sequences.prompt[i * together].at, 0};
    for (int64_t j = i * together; j < (i + 1) * together; ++j) all.size += sequences.prompt[j].size;
    return all;
  }
  int64_t most_seen() const {
    int64_t prompt = 0, completion = 0;
    for (int64_t i = 0; i < runs(); ++i) prompt = std::max(prompt, run(i).size);
    for (const Span &span : sequences.completion) completion = std::max(completion, span.size);
    return prompt + completion;
  }
};

// A block of query rows of one head: `rows` asking rows, from `query` on. They see the `prompt` keys from prompt_key on, and
// up to `own` keys of their own sequence, from own_key on: of both, the first row sees `seen`, and each row `more` than the
// one before.
struct Block {
  int64_t query, rows, prompt_key, prompt, own_key, own, seen, more;
};

template <typename Body>
void blocks(const Attention &a, int64_t i, Body body) {
  const Sequences &s = a.sequences;
  auto cut = [&](const Span &span, const Span &before) {
    for (int64_t first = 0; first < span.size; first += kQueryRows) {
      const int64_t rows = std::min(kQueryRows, span.size - first), own = a.together ? span.size : first + rows;
      const int64_t seen = before.size + (a.together ? own : first + 1);
      body(Block{span.at + first - s.skip, rows, before.at, before.size, span.at, own, seen, !a.together});
    }
  };
  if (!s.skip) cut(a.run(i), Span{0, 0});
  for (int64_t g = 0; g < s.samples; ++g) cut(s.completion[i * s.samples + g], s.prompt[i]);
}

// Computes a block's prepared query [rows, d] and its weights [rows, prompt + own]: the softmax over the keys that each row
// sees, 0 for other keys. raw [asking, width], key [rows, key_width]: pointers to the first column of the block's head.
void block_weights(const Attention &a, const Block &b, Input raw, Input key, Output query, Output weights) {
  const int64_t size = b.prompt + b.own, width = a.key_width(), d = a.d();
  for (int64_t i = 0; i < b.rows; ++i) {
    const int64_t row = b.query + i;
    a.turning.prepare(raw + row * a.width(), a.q_norm, a.position(a.sequences.skip + row), 1, query + i * d);
  }
  gemm('N', 'T', b.rows, b.prompt, d, a.scale, query, d, key + b.prompt_key * width, width, 0, weights, size);
  gemm('N', 'T', b.rows, b.own, d, a.scale, query, d, key + b.own_key * width, width, 0, weights + b.prompt, size);
  for (int64_t row = 0; row < b.rows; ++row) {
    const int64_t seen = b.seen + row * b.more;
    softmax(weights + row * size, seen);
    std::fill(weights + row * size + seen, weights + (row + 1) * size, 0.0f);
  }
}

// Computes the output [asking, width] of attention from query [asking, width] (not yet prepared), key (prepared) and value
// [rows, key_width].
void attend(const Attention &a, Input query, Input key, Input value, Output output) {
  const int64_t d = a.d(), width = a.key_width(), most = a.most_seen();
  parallel_pieces(a.runs() * a.heads * a.queries, 1, [&](int64_t task, int64_t) {
    const int64_t i = task / (a.heads * a.queries), h = task % (a.heads * a.queries), head = h / a.queries;
    Output ready = scratch(kQueryRows * (d + most)), weights = ready + kQueryRows * d;
    blocks(a, i, [&](const Block &b) {
      block_weights(a, b, query + h * d, key + head * d, ready, weights);
      const int64_t size = b.prompt + b.own;
      Input own = value + head * d;
      Output out = output + b.query * a.width() + h * d;
      gemm('N', 'N', b.rows, d, b.own, 1, weights + b.prompt, size, own + b.own_key * width, width, 0, out, a.width());
      if (b.prompt) {
        gemm('N', 'N', b.rows, d, b.prompt, 1, weights, size, own + b.prompt_key * width, width, 1, out, a.width());
      }
    });
  });
}

// Computes the gradients of query (in place), prepared key and value from d_output. Adds the gradient of q_norm to d_norms:
// one [d] for each prompt and key head, which the caller sums; null if the model has no q_norm.
void attend_gradient(const Attention &a, Output query, Input key, Input value, Input d_output, Output d_key, Output d_value,
                     Output d_norms) {
  const int64_t d = a.d(), width = a.key_width(), most = a.most_seen();
  std::fill(d_key, d_key + a.sequences.rows * width, 0.0f);
  std::fill(d_value, d_value + a.sequences.rows * width, 0.0f);
  parallel_pieces(a.runs() * a.heads, 1, [&](int64_t task, int64_t) {
    const int64_t i = task / a.heads, head = task % a.heads;
    Output ready = scratch(kQueryRows * 2 * (d + most) + d), d_ready = ready + kQueryRows * d;
    Output weights = d_ready + kQueryRows * d, memory = weights + kQueryRows * 2 * most;
    for (int64_t j = 0; j < a.queries; ++j) {
      const int64_t at = (head * a.queries + j) * d;
      blocks(a, i, [&](const Block &b) {
        block_weights(a, b, query + at, key + head * d, ready, weights);
        const int64_t size = b.prompt + b.own;
        Output slopes = weights + b.rows * size;
        Input d_out = d_output + b.query * a.width() + at;
        struct Part {
          int64_t key, size, column;
        };
        const Part parts[2] = {{b.own_key, b.own, b.prompt}, {b.prompt_key, b.prompt, 0}};
        for (const Part &part : parts) {
          const int64_t offset = part.key * width + head * d;
          gemm('N', 'T', b.rows, part.size, d, 1, d_out, a.width(), value + offset, width, 0, slopes + part.column, size);
          if (part.size) {
            gemm('T', 'N', part.size, d, b.rows, 1, weights + part.column, size, d_out, a.width(), 1, d_value + offset,
                 width);
          }
        }
        for (int64_t row = 0; row < b.rows; ++row) {
          Input w = weights + row * size;
          Output s = slopes + row * size;
          const float mean = sum_over(size, [=](int64_t c) INLINE { return w[c] * s[c]; });
#pragma omp simd
          for (int64_t c = 0; c < size; ++c) s[c] = w[c] * (s[c] - mean) * a.scale;
        }
        float keep = 0;
        for (const Part &part : parts) {
          if (!part.size) continue;
          const int64_t offset = part.key * width + head * d;
          gemm('N', 'N', b.rows, d, part.size, 1, slopes + part.column, size, key + offset, width, keep, d_ready, d);
          gemm('T', 'N', part.size, d, b.rows, 1, slopes + part.column, size, ready, d, 1, d_key + offset, width);
          keep = 1;
        }
        for (int64_t row = 0; row < b.rows; ++row) {
          Output own = query + (b.query + row) * a.width() + at;
          a.turning.gradient(d_ready + row * d, own, a.q_norm, a.position(a.sequences.skip + b.query + row), 1, own,
                             d_norms ? d_norms + task * d : nullptr, memory);
        }
      });
    }
  });
}

}  // namespace
