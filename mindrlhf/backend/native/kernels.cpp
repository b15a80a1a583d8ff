// Fused operators of the transformer and its losses for MindSpore's CPU backend, float32.
//
// Every entry point has the signature of MindSpore's ahead-of-time custom operators: inputs, then outputs, as pointers
// with their shapes. Arrays are dense and row-major. Each output row is computed by one thread in one order, so that
// results do not depend on the number of threads. The Python side (`operators.py`) has the shapes and the meaning.

#include <dlfcn.h>
#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Gemm = int (*)(char, char, int64_t, int64_t, int64_t, float, const float *, int64_t, const float *, int64_t,
                     float, float *, int64_t);

// oneDNN as it comes with MindSpore, called on one thread: the loops around it share the work.
Gemm find_gemm() {
  void *library = dlopen("libdnnl.so.3", RTLD_NOW);
  return library ? reinterpret_cast<Gemm>(dlsym(library, "dnnl_sgemm")) : nullptr;
}

const Gemm library_gemm = find_gemm();

// c [m, n] = alpha * op(a) op(b) + beta * c
void gemm(char a_op, char b_op, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
          const float *b, int64_t ldb, float beta, float *c, int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) {
    for (int64_t i = 0; i < m && beta == 0; ++i) std::fill(c + i * ldc, c + i * ldc + n, 0.0f);
    return;
  }
  library_gemm(a_op, b_op, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}

const int64_t kRows = 192;      // rows of one piece of work
const int64_t kColumns = 128;   // columns of one, where that is how it is cut
const int64_t kFewRows = 64;    // rows of a weight, in the products of a decode step
const int64_t kPanel = 32;      // columns of such a product
const int64_t kQueryRows = 64;  // rows of scores held at once
const int64_t kNumbers = 1 << 14;  // of one piece of a parameter

// Threads that share the pieces of an operator with the one that calls it. Operators follow each other within
// microseconds, in which threads of OpenMP fall asleep, and waking one takes longer than many a piece; these look for more
// work for a while first. The caller never waits for one that has not begun.
class Team {
 public:
  static Team &get() {
    static Team *team = new Team(std::max(1, omp_get_max_threads()) - 1);  // never deleted: threads end with the process
    return *team;
  }

  int threads() const { return helpers_ + 1; }

  // body(i) for i below count, in any order. One operator at a time is shared; others that run meanwhile are not.
  template <typename Body>
  void share(int64_t count, const Body &body) {
    std::unique_lock<std::mutex> mine(owner_, std::try_to_lock);
    if (helpers_ == 0 || !mine.owns_lock()) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run_ = [](const void *b, int64_t i) { (*static_cast<const Body *>(b))(i); };
    body_ = &body, count_ = count, next_ = 0;
    ++job_;  // odd: there is work
    if (asleep_ > 0) syscall(SYS_futex, &job_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    work();
    ++job_;
    for (int i = 0; inside_ > 0; ++i) pause(i);
  }

 private:
  explicit Team(int helpers) : helpers_(helpers) {
    for (int i = 0; i < helpers; ++i) std::thread([this] { help(); }).detach();
  }

  void work() {
    for (int64_t i = next_++; i < count_; i = next_++) run_(body_, i);
  }

  void help() {
    for (uint32_t done = 0;;) {
      const uint32_t now = found(done);
      ++inside_;
      if (job_ == now) work();  // else the caller may be gone already
      --inside_;
      done = now;
    }
  }

  // The number of a job that is not `done`; sleeps when there has been none for some time.
  uint32_t found(uint32_t done) {
    for (int i = 0;; ++i) {
      const uint32_t now = job_;
      if (now % 2 == 1 && now != done) return now;
      if (i < kLook) {
        pause(i);
        continue;
      }
      ++asleep_;
      syscall(SYS_futex, &job_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);  // at once if it changed
      --asleep_;
      i = 0;
    }
  }

  static void pause(int i) {
    if (i % 64 == 63) {
      sched_yield();  // to whom this core may belong
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  static const int kLook = 1 << 14;

  const int helpers_;
  std::mutex owner_;
  std::atomic<uint32_t> job_{0};
  std::atomic<int> inside_{0}, asleep_{0};
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  const void *body_ = nullptr;
  void (*run_)(const void *, int64_t) = nullptr;
};

// body(first, size) of pieces of about `size` of `total`, which are shared out.
template <typename Body>
void pieces(int64_t total, int64_t size, Body body) {
  const int64_t count = (total + size - 1) / size;
  auto one = [&](int64_t i) { body(i * size, std::min(size, total - i * size)); };
  if (count == 1) return one(0);
  if (count > 1) Team::get().share(count, one);
}

// The size of the smallest number of about equal pieces of at most `most` of `total`.
int64_t even(int64_t total, int64_t most) {
  const int64_t count = std::max<int64_t>((total + most - 1) / most, 1);
  return std::max<int64_t>((total + count - 1) / count, 1);
}

int64_t count(const int64_t *shape, int dims) {
  int64_t total = 1;
  for (int i = 0; i < dims; ++i) total *= shape[i];
  return total;
}

// e^x to 2 units in the last place (Cody & Waite's reduction, a polynomial of degree 6); NaN stays NaN. A loop that calls
// it, rather than having it inside, works on one number at a time.
__attribute__((always_inline)) inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

// Numbers that are added up side by side, whatever the registers hold: compilers are slow at sums in a fixed order.
typedef float Lanes __attribute__((vector_size(64)));
const int64_t kLanes = 16;

inline Lanes lanes(const float *x) {
  Lanes all;
  std::memcpy(&all, x, sizeof(all));
  return all;
}

typedef int32_t Order __attribute__((vector_size(64)));

inline float sum_of(Lanes x) {
  x += __builtin_shuffle(x, Order{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  x += __builtin_shuffle(x, Order{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
  x += __builtin_shuffle(x, Order{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
  return x[0] + x[1];
}

// The sixteen `sum_of`, to the last bit. x is overwritten.
inline Lanes sums_of(Lanes *x) {
  auto fold = [x](int count, Order low, Order high) {
    for (int i = 0; i < count; ++i) {
      x[i] = __builtin_shuffle(x[2 * i], x[2 * i + 1], low) + __builtin_shuffle(x[2 * i], x[2 * i + 1], high);
    }
  };
  fold(8, Order{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23},
       Order{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  fold(4, Order{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27},
       Order{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
  fold(2, Order{0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29},
       Order{2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31});
  fold(1, Order{0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
       Order{1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31});
  return x[0];
}

// The sum of term(i) for i below n.
template <typename Term>
__attribute__((always_inline)) inline float sum_over(int64_t n, Term term) {
  Lanes total = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    float terms[kLanes];
#pragma omp simd
    for (int64_t j = 0; j < kLanes; ++j) terms[j] = term(i + j);
    total += lanes(terms);
  }
  float rest = 0;
  for (; i < n; ++i) rest += term(i);
  return sum_of(total) + rest;
}

inline float largest(const float *x, int64_t n) {
  float top = x[0];
  int64_t i = 0;
  if (n >= kLanes) {
    Lanes tops = lanes(x);
    for (; i + kLanes <= n; i += kLanes) tops = lanes(x + i) > tops ? lanes(x + i) : tops;
    for (int64_t j = 0; j < kLanes; ++j) top = std::max(top, tops[j]);
  }
  for (; i < n; ++i) top = std::max(top, x[i]);
  return top;
}

// x becomes exp(x - its largest) / their sum.
inline void softmax(float *x, int64_t n) {
  const float top = largest(x, n);
  const float inverse = 1.0f / sum_over(n, [=](int64_t i) { return x[i] = exponential(x[i] - top); });
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) x[i] *= inverse;
}

// y = x * weight / sqrt(mean(x^2) + eps) of `rows` rows
void norm_rows(const float *x, const float *weight, float eps, float *y, int64_t rows, int64_t size) {
  for (int64_t i = 0; i < rows; ++i, x += size, y += size) {
    const float squares = sum_over(size, [=](int64_t j) { return x[j] * x[j]; });
    const float scale = 1.0f / std::sqrt(squares / size + eps);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) y[j] = x[j] * scale * weight[j];
  }
}

// dx of `rows` rows; to `sum` the gradient of the weight is added. `add`: dx to what is there.
void norm_gradient_rows(const float *dy, const float *x, const float *weight, float eps, float *dx, float *sum,
                        int64_t rows, int64_t size, bool add = false) {
  const float keep = add ? 1 : 0;
  for (int64_t i = 0; i < rows; ++i, dy += size, x += size, dx += size) {
    const float squares = sum_over(size, [=](int64_t j) { return x[j] * x[j]; });
    const float product = sum_over(size, [=](int64_t j) { return dy[j] * weight[j] * x[j]; });
    const float scale = 1.0f / std::sqrt(squares / size + eps);
    const float back = product * scale * scale * scale / size;
    if (!add) std::fill(dx, dx + size, 0.0f);
#pragma omp simd
    for (int64_t j = 0; j < size; ++j) {
      dx[j] = keep * dx[j] + dy[j] * weight[j] * scale - x[j] * back;
      sum[j] += dy[j] * x[j] * scale;
    }
  }
}

// The heads of one token, x [heads, d], turned by its angles (or back, for sign -1); x and y may be the same.
void turn(const float *x, const float *cos, const float *sin, float sign, float *y, int64_t heads, int64_t d) {
  const int64_t half = d / 2;
  for (int64_t h = 0; h < heads; ++h, x += d, y += d) {
#pragma omp simd
    for (int64_t j = 0; j < half; ++j) {
      const float low = x[j], high = x[half + j];
      y[j] = low * cos[j] - sign * high * sin[j];
      y[half + j] = high * cos[half + j] + sign * low * sin[half + j];
    }
  }
}

// y = silu(gate) * up; y may be gate
void gated(const float *gate, const float *up, float *y, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

// Gradients of gate and up from that of what `gated` makes of them; they may take the place of gate and up.
void gated_gradient(const float *dy, const float *gate, const float *up, float *d_gate, float *d_up, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const float slope = dy[i], g = gate[i], u = up[i], sigmoid = 1.0f / (1.0f + exponential(-g));
    d_gate[i] = slope * u * sigmoid * (1.0f + g * (1.0f - sigmoid));
    d_up[i] = slope * g * sigmoid;
  }
}

// One memory block for each thread, which grows and is kept: 64 bytes aligned.
float *scratch(int64_t numbers) {
  thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < numbers + 16) memory.resize(numbers + 16);
  return reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

// ------------------------------------------------------------------------------------------------ attention

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

// Sequences of a static cache: K key heads, query heads for each, S positions, head size; and of each row of queries
// its slot in the cache and its position. The first `prefixes` positions of a row are those of the slot `leaders`, where
// rows of one leader read them together; the others lie in its own slot, from `base` on.
struct Slots {
  int64_t rows, heads, queries, size, d, base;
  const int32_t *slots, *positions, *leaders, *prefixes;

  int64_t prefix(int64_t row) const { return std::min<int64_t>(std::max(prefixes[row], 0), base); }
  // Positions of its own, with the new one.
  int64_t own(int64_t row) const {
    return std::min<int64_t>(std::max<int64_t>(positions[row] - prefix(row), 0) + 1, size - base);
  }
  int64_t seen(int64_t row) const { return prefix(row) + own(row); }
};

const int64_t kBunch = 8;  // rows of one leader that are worked on together

// Rows in an order in which those of one leader are neighbours, and where the bunches of them begin.
struct Bunches {
  std::vector<int32_t> rows;
  std::vector<int64_t> starts;

  explicit Bunches(const Slots &s) : rows(s.rows) {
    std::iota(rows.begin(), rows.end(), 0);
    std::stable_sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) { return s.leaders[a] < s.leaders[b]; });
    for (int64_t i = 0; i < s.rows; ++i) {
      const bool follows = i && s.leaders[rows[i]] == s.leaders[rows[i - 1]] && i - starts.back() < kBunch;
      if (!follows) starts.push_back(i);
    }
    starts.push_back(s.rows);
  }
};

// weights[t] = the inner product of q and row t of keys, for t from `first` to `end`; d = C * kLanes
template <int C>
void score_lanes(const float *q, const float *keys, int64_t first, int64_t end, float *weights) {
  Lanes own[C];
  std::memcpy(own, q, sizeof(own));
  auto product = [&](int64_t t) {
    const float *key = keys + t * C * kLanes;
    Lanes sums = own[0] * lanes(key);
    for (int c = 1; c < C; ++c) sums += own[c] * lanes(key + c * kLanes);
    return sums;
  };
  int64_t t = first;
  for (; t + kLanes <= end; t += kLanes) {
    Lanes products[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) products[i] = product(t + i);
    const Lanes all = sums_of(products);
    std::memcpy(weights + t, &all, sizeof(all));
  }
  for (; t < end; ++t) weights[t] = sum_of(product(t));
}

// The same for any d.
inline void score(const float *q, const float *keys, int64_t first, int64_t end, int64_t d, float *weights) {
  if (d == 4 * kLanes) return score_lanes<4>(q, keys, first, end, weights);
  if (d == 8 * kLanes) return score_lanes<8>(q, keys, first, end, weights);
  for (int64_t t = first; t < end; ++t) {
    weights[t] = sum_over(d, [q, key = keys + t * d](int64_t c) { return q[c] * key[c]; });
  }
}

// out += the sum of weights[t] times row t of values, for t from `first` to `end`; for Q queries, whose weights are
// `stride` apart, and d = C * kLanes.
template <int Q, int C>
void mix_lanes(const float *weights, int64_t stride, const float *values, int64_t first, int64_t end, float *out) {
  Lanes sums[Q * C];
  for (int i = 0; i < Q * C; ++i) sums[i] = lanes(out + i * kLanes);
  for (int64_t t = first; t < end; ++t) {
    for (int c = 0; c < C; ++c) {
      const Lanes value = lanes(values + (t * C + c) * kLanes);
      for (int j = 0; j < Q; ++j) sums[j * C + c] += weights[j * stride + t] * value;
    }
  }
  std::memcpy(out, sums, sizeof(sums));
}

// The same for any number of queries and any d.
inline void mix(const float *weights, int64_t stride, const float *values, int64_t first, int64_t end, int64_t d,
                int64_t queries, float *out) {
  auto several = [&](auto two, auto one) {
    int64_t j = 0;
    for (; j + 2 <= queries; j += 2) two(weights + j * stride, stride, values, first, end, out + j * d);
    if (j < queries) one(weights + j * stride, stride, values, first, end, out + j * d);
  };
  if (d == 4 * kLanes) return several(mix_lanes<2, 4>, mix_lanes<1, 4>);
  if (d == 8 * kLanes) return several(mix_lanes<2, 8>, mix_lanes<1, 8>);
  for (int64_t j = 0; j < queries; ++j) {
    for (int64_t t = first; t < end; ++t) {
      const float w = weights[j * stride + t], *v = values + t * d;
#pragma omp simd
      for (int64_t c = 0; c < d; ++c) out[j * d + c] += w * v[c];
    }
  }
}

// Writes the new key and value of each row into the caches and attends to what its slot holds so far. `before` is
// called with each row and key head first: it may still change queries and keys.
template <typename Before>
void attend_slots(const Slots &s, const float *query, const float *key, const float *value, float *key_cache,
                  float *value_cache, float scale, float *output, Before before) {
  const int64_t d = s.d, width = s.heads * s.queries * d, near = 32;  // positions that stay in the nearest cache
  const Bunches bunches(s);
  pieces((bunches.starts.size() - 1) * s.heads, 1, [&](int64_t task, int64_t) {
    const int64_t bunch = task / s.heads, head = task % s.heads;
    const int32_t *rows = bunches.rows.data() + bunches.starts[bunch];
    const int64_t count = bunches.starts[bunch + 1] - bunches.starts[bunch];
    auto place = [&](int64_t slot) { return (slot * s.heads + head) * s.size * d; };
    const int64_t shared = s.prefix(rows[0]), apart = (s.base - shared) * d;  // of one leader, one prompt
    int64_t most = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = rows[i], at = (row * s.heads + head) * d;
      const int64_t target = place(s.slots[row]) + (s.base + s.own(row) - 1) * d;
      before(row, head);
      std::copy(key + at, key + at + d, key_cache + target);
      std::copy(value + at, value + at + d, value_cache + target);
      most = std::max(most, s.seen(row));
    }
    float *weights = scratch(count * s.queries * most);
    auto for_queries = [&](int64_t i, auto body) {
      const int64_t at = rows[i] * width + head * s.queries * d;
      for (int64_t j = 0; j < s.queries; ++j) body(query + at + j * d, weights + (i * s.queries + j) * most);
    };
    auto mixed = [&](int64_t i, const float *values, int64_t first, int64_t end) {
      float *out = output + rows[i] * width + head * s.queries * d;
      mix(weights + i * s.queries * most, most, values, first, end, d, s.queries, out);
    };
    const float *leader = key_cache + place(s.leaders[rows[0]]);
    for (int64_t t = 0; t < shared; t += near) {
      for (int64_t i = 0; i < count; ++i) {
        for_queries(i, [&](const float *q, float *w) { score(q, leader, t, std::min(t + near, shared), d, w); });
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t seen = s.seen(rows[i]);
      const float *own = key_cache + place(s.slots[rows[i]]) + apart;
      for_queries(i, [&](const float *q, float *w) {
        score(q, own, shared, seen, d, w);
        for (int64_t t = 0; t < seen; ++t) w[t] *= scale;
        softmax(w, seen);
      });
      float *out = output + rows[i] * width + head * s.queries * d;
      std::fill(out, out + s.queries * d, 0.0f);
    }
    leader = value_cache + place(s.leaders[rows[0]]);
    for (int64_t t = 0; t < shared; t += near) {
      for (int64_t i = 0; i < count; ++i) mixed(i, leader, t, std::min(t + near, shared));
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t seen = s.seen(rows[i]);
      mixed(i, value_cache + place(s.slots[rows[i]]) + apart, shared, seen);
    }
  });
}

// One row for each slot, which shares nothing.
struct Single {
  std::vector<int32_t> numbered, zeros;

  explicit Single(int64_t n) : numbered(n), zeros(n, 0) { std::iota(numbered.begin(), numbered.end(), 0); }
};

// bias [columns], or null, is added to each of the rows of y, which are `stride` apart
void add_bias(const float *bias, float *y, int64_t rows, int64_t columns, int64_t stride) {
  if (!bias) return;
  for (int64_t i = 0; i < rows; ++i, y += stride) {
#pragma omp simd
    for (int64_t c = 0; c < columns; ++c) y[c] += bias[c];
  }
}

// x [T, in], weight [out, in] (, bias [out]) -> y [T, out]
void linear_any(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t in, int64_t out) {
  if (rows >= 2 * kRows) {
    pieces(rows, kRows, [&](int64_t i, int64_t m) {
      gemm('N', 'T', m, out, in, 1, x + i * in, in, w, in, 0, y + i * out, out);
      add_bias(bias, y + i * out, m, out, out);
    });
  } else {
    pieces(out, kColumns, [&](int64_t j, int64_t n) {
      gemm('N', 'T', rows, n, in, 1, x, in, w + j * in, in, 0, y + j, out);
      add_bias(bias ? bias + j : nullptr, y + j, rows, n, out);
    });
  }
}

// dy [rows, out], weight [out, in] -> dx [rows, in]
void input_gradient(const float *dy, const float *w, float *dx, int64_t rows, int64_t in, int64_t out) {
  if (rows >= 2 * kRows) {
    pieces(rows, kRows, [&](int64_t i, int64_t m) {
      gemm('N', 'N', m, in, out, 1, dy + i * out, out, w, in, 0, dx + i * in, in);
    });
  } else {
    pieces(in, kColumns, [&](int64_t j, int64_t n) { gemm('N', 'N', rows, n, out, 1, dy, out, w + j, in, 0, dx + j, in); });
  }
}

// Of a weight [out, in]: from dy [rows, out] and x [rows, in].
struct WeightGradient {
  int64_t rows;
  const float *dy, *x;
  float *target;
  int64_t out, in;
};

// Columns of the longer side of all of them are shared out together. `add`: to what is there.
void weight_gradients(std::initializer_list<WeightGradient> list, bool add) {
  std::vector<std::pair<const WeightGradient *, int64_t>> parts;
  for (const WeightGradient &one : list) {
    for (int64_t j = 0; j < std::max(one.out, one.in); j += kColumns) parts.emplace_back(&one, j);
  }
  const float keep = add ? 1 : 0;
  pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const WeightGradient &g = *parts[part].first;
    const int64_t j = parts[part].second;
    if (g.out < g.in) {
      gemm('T', 'N', g.out, std::min(kColumns, g.in - j), g.rows, 1, g.dy, g.out, g.x + j, g.in, keep, g.target + j, g.in);
      return;
    }
    const int64_t n = std::min(kColumns, g.out - j);
    const float *dy = g.dy + j;
    int64_t stride = g.out;
    if (g.out % 1024 == 0) {  // such columns fall on the same lines of the cache: half the speed
      stride = n + 16;
      float *copy = scratch(g.rows * stride);
      for (int64_t i = 0; i < g.rows; ++i) std::copy(dy + i * g.out, dy + i * g.out + n, copy + i * stride);
      dy = copy;
    }
    gemm('T', 'N', n, g.in, g.rows, 1, dy, stride, g.x, g.in, keep, g.target + j * g.in, g.in);
  });
}

// to sums [columns] the rows of x [rows, columns] are added
void add_rows(const float *x, int64_t rows, int64_t columns, float *sums) {
  pieces(columns, kColumns, [&](int64_t j, int64_t n) {
    for (int64_t i = 0; i < rows; ++i) {
      const float *row = x + i * columns;
#pragma omp simd
      for (int64_t c = j; c < j + n; ++c) sums[c] += row[c];
    }
  });
}

// The rows of a decode step as columns, in panels of kPanel or half as many of them: a weight is taken as it lies in
// products with such, while those of rows and a weight begin with a copy of it. Panels of an array with `size` numbers in
// a row follow each other; each is [size, width], and the last may have columns that are not used.
struct Panels {
  int64_t rows, columns;

  explicit Panels(int64_t rows) : rows(rows), columns((rows + kPanel / 2 - 1) / (kPanel / 2) * (kPanel / 2)) {}

  // body(first, width), of which `used(first, width)` hold a row
  template <typename Body>
  void each(Body body) const {
    for (int64_t i = 0; i < columns; i += kPanel) body(i, std::min(kPanel, columns - i));
  }
  // The same, shared out.
  template <typename Body>
  void share(Body body) const {
    pieces(columns, kPanel, body);
  }
  int64_t used(int64_t first, int64_t width) const { return std::min(width, rows - first); }
};

// panels of the rows row(i) [size]
template <typename Row>
void to_panels(const Panels &panels, int64_t size, const Row &row, float *x) {
  const int64_t near = 16;  // numbers of each row at a time
  panels.share([&](int64_t first, int64_t width) {
    float *panel = x + first * size;
    const int64_t used = panels.used(first, width);
    for (int64_t j = 0; j < size; j += near) {
      const int64_t end = std::min(j + near, size);
      for (int64_t i = 0; i < used; ++i) {
        const float *own = row(first + i);
        for (int64_t c = j; c < end; ++c) panel[c * width + i] = own[c];
      }
      for (int64_t c = j; c < end; ++c) std::fill(panel + c * width + used, panel + (c + 1) * width, 0.0f);
    }
  });
}

// `norm_rows` of panels
void norm_panels(const Panels &panels, const float *x, const float *weight, float eps, float *y, int64_t size) {
  panels.share([&](int64_t first, int64_t width) {
    const float *from = x + first * size;
    float *to = y + first * size, scale[kPanel] = {};
    for (int64_t j = 0; j < size; ++j) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) scale[i] += from[j * width + i] * from[j * width + i];
    }
    for (int64_t i = 0; i < width; ++i) scale[i] = 1.0f / std::sqrt(scale[i] / size + eps);
    for (int64_t j = 0; j < size; ++j) {
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) to[j * width + i] = from[j * width + i] * scale[i] * weight[j];
    }
  });
}

// Of several products with the same x: weight [out, in], bias [out] or null, y [rows, out].
struct Product {
  const float *weight, *bias;
  float *y;
  int64_t out;
};

// x: panels. The columns of all products are shared out together.
void products(const Panels &panels, const float *x, int64_t in, std::initializer_list<Product> list) {
  std::vector<std::pair<const Product *, int64_t>> parts;
  for (const Product &one : list) {
    for (int64_t j = 0; j < one.out; j += kFewRows) parts.emplace_back(&one, j);
  }
  pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const Product &one = *parts[part].first;
    const int64_t j = parts[part].second, n = std::min(kFewRows, one.out - j);
    float *part_y = scratch(n * kPanel);
    panels.each([&](int64_t first, int64_t width) {
      gemm('N', 'N', n, width, in, 1, one.weight + j * in, in, x + first * in, width, 0, part_y, width);
      for (int64_t i = 0; i < panels.used(first, width); ++i) {
        float *row = one.y + (first + i) * one.out + j;
        for (int64_t c = 0; c < n; ++c) row[c] = part_y[c * width + i];
        add_bias(one.bias ? one.bias + j : nullptr, row, 1, n, 0);
      }
    });
  });
}

// x [in] and y [out]: panels; to y the product with weight [out, in] is added.
void add_product(const Panels &panels, const float *x, int64_t in, const float *weight, float *y, int64_t out) {
  pieces(out, kFewRows, [&](int64_t j, int64_t n) {
    panels.each([&](int64_t first, int64_t width) {
      gemm('N', 'N', n, width, in, 1, weight + j * in, in, x + first * in, width, 1, y + first * out + j * width, width);
    });
  });
}

// A layer's parameters in the order in which operators take them, its caches, and what all layers share.
struct Layer {
  enum { NORM, WQ, WK, WV, BQ, BK, BV, QN, KN, WO, FFN, W1, W3, W2, WEIGHTS };
  float *const *weights;
  float *keys, *values;
  int64_t hidden, inner, width, key_width;
  float scale, eps;
  bool has_bias, has_norms;

  int64_t scratch_size() const { return hidden + 3 * width + 2 * key_width + inner; }  // of a row
};

// The panels x [hidden] become the layer's output for one new position of each row; the row's angles are those at
// `angles[row]` of the tables cos and sin. memory: scratch_size() for each column.
void decode_rows(const Layer &layer, const Slots &slots, const Panels &panels, const float *cos, const float *sin,
                 const int32_t *angles, float *x, float *memory) {
  float *const *w = layer.weights;
  const int64_t columns = panels.columns, hidden = layer.hidden, inner = layer.inner, d = slots.d;
  const int64_t width = layer.width, key_width = layer.key_width;
  float *h = memory, *q = h + columns * hidden, *attended = q + columns * width, *turned = attended + columns * width;
  float *k = turned + columns * width, *v = k + columns * key_width, *act = v + columns * key_width;
  auto bias = [&](int which) { return layer.has_bias ? w[which] : nullptr; };
  norm_panels(panels, x, w[Layer::NORM], layer.eps, h, hidden);
  products(panels, h, hidden,
           {{w[Layer::WQ], bias(Layer::BQ), q, width},
            {w[Layer::WK], bias(Layer::BK), k, key_width},
            {w[Layer::WV], bias(Layer::BV), v, key_width}});
  auto before = [&](int64_t row, int64_t head) {
    float *own_q = q + row * width + head * slots.queries * d, *own_k = k + row * key_width + head * d;
    if (layer.has_norms) {
      norm_rows(own_q, w[Layer::QN], layer.eps, own_q, slots.queries, d);
      norm_rows(own_k, w[Layer::KN], layer.eps, own_k, 1, d);
    }
    const int64_t at = angles[row] * d;
    turn(own_q, cos + at, sin + at, 1, own_q, slots.queries, d);
    turn(own_k, cos + at, sin + at, 1, own_k, 1, d);
  };
  attend_slots(slots, q, k, v, layer.keys, layer.values, layer.scale, attended, before);
  to_panels(panels, width, [=](int64_t row) { return attended + row * width; }, turned);
  add_product(panels, turned, width, w[Layer::WO], x, hidden);
  norm_panels(panels, x, w[Layer::FFN], layer.eps, h, hidden);
  pieces(inner, kFewRows, [&](int64_t j, int64_t n) {
    float *up = scratch(n * kPanel);
    panels.each([&](int64_t first, int64_t count) {
      float *gate = act + first * inner + j * count;
      const float *own = h + first * hidden;
      gemm('N', 'N', n, count, hidden, 1, w[Layer::W1] + j * hidden, hidden, own, count, 0, gate, count);
      gemm('N', 'N', n, count, hidden, 1, w[Layer::W3] + j * hidden, hidden, own, count, 0, up, count);
      gated(gate, up, gate, n * count);
    });
  });
  add_product(panels, act, inner, w[Layer::W2], x, hidden);
}

struct Drawn {
  int32_t token;
  float behaviour, policy;  // log-probs
};

// One token of `size` logits. stops: tokens that may not come if `banned`.
Drawn draw(const float *logits, int64_t size, float uniform, bool banned, const int32_t *stops, int64_t stop_count,
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
    sums.push_back(sum_over(end - first, [=](int64_t j) { return w[j] = w[j] == -INFINITY ? 0.0f : exponential(w[j] - top); }));
    total += sums.back();
  }
  int64_t token = 0;
  if (greedy) {
    while (token + 1 < size && !(weights[token] >= 1.0f)) ++token;
  } else {
    // The first token whose cumulative weight lies above uniform * total; the last that has weight if none does.
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
    token = std::max<int64_t>(token, 0);  // not a number
  }
  const float below = logits[token] * inverse - top;
  double every = total;
  if (banned) for_stops([&](int32_t id) { every += exponential(logits[id] * inverse - top); });
  return {static_cast<int32_t>(token), greedy ? 0.0f : below - static_cast<float>(std::log(total)),
          below - static_cast<float>(std::log(every))};
}

struct Part {
  int tensor;
  int64_t first, size;
};

// All tensors cut into pieces. `at(i)`: the index of tensor i among the arrays.
template <typename At>
std::vector<Part> parts_of(int tensors, const int *ndims, int64_t **shapes, At at) {
  std::vector<Part> parts;
  for (int i = 0; i < tensors; ++i) {
    const int64_t total = count(shapes[at(i)], ndims[at(i)]);
    for (int64_t j = 0; j < total; j += kNumbers) parts.push_back({i, j, std::min(kNumbers, total - j)});
  }
  return parts;
}

}  // namespace

extern "C" {

// 0 when there is a matrix product to build on.
int usable() { return library_gemm ? 0 : 1; }

// ------------------------------------------------------------------------------------------------ linear

// x [T, in], weight [out, in] -> y [T, out]
int linear(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  linear_any(p[0], p[1], nullptr, p[2], shapes[0][0], shapes[0][1], shapes[1][0]);
  return 0;
}

// The same with a bias [out] before y.
int linear_bias(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  linear_any(p[0], p[1], p[2], p[3], shapes[0][0], shapes[0][1], shapes[1][0]);
  return 0;
}

// dy [T, out], weight [out, in] -> dx [T, in]
int linear_input_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  input_gradient(p[0], p[1], p[2], shapes[0][0], shapes[1][1], shapes[0][1]);
  return 0;
}

// dy [T, out], x [T, in] -> dweight [out, in]
int linear_weight_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  weight_gradients({{shapes[0][0], p[0], p[1], p[2], shapes[0][1], shapes[1][1]}}, false);
  return 0;
}

// dy [T, out] -> dbias [out]
int bias_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t rows = shapes[0][0], out = shapes[0][1];
  std::fill(p[1], p[1] + out, 0.0f);
  add_rows(p[0], rows, out, p[1]);
  return 0;
}

// ------------------------------------------------------------------------------------------------ element by element

// x [..., H], weight [H], eps [1] -> x * weight / sqrt(mean(x^2) + eps)
int rms_norm(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t size = shapes[1][0], rows = count(shapes[0], ndims[0]) / size;
  pieces(rows, kRows, [&](int64_t i, int64_t m) { norm_rows(p[0] + i * size, p[1], *p[2], p[3] + i * size, m, size); });
  return 0;
}

// dy, x [..., H], weight [H], eps [1] -> dx, dweight [H]
int rms_norm_gradient(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t size = shapes[2][0], rows = count(shapes[0], ndims[0]) / size;
  const int64_t parts = (rows + kRows - 1) / kRows;
  std::vector<float> partial(parts * size, 0.0f);
  pieces(rows, kRows, [&](int64_t first, int64_t m) {
    norm_gradient_rows(p[0] + first * size, p[1] + first * size, p[2], *p[3], p[4] + first * size,
                       partial.data() + first / kRows * size, m, size);
  });
  std::fill(p[5], p[5] + size, 0.0f);
  for (int64_t part = 0; part < parts; ++part) {
    for (int64_t j = 0; j < size; ++j) p[5][j] += partial[part * size + j];
  }
  return 0;
}

// x [1, T, heads, d], cos, sin [1, T, 1, d], sign [1] -> x turned by the angles, or back for sign -1
int rotary(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int64_t rows = shapes[0][1], heads = shapes[0][2], d = shapes[0][3];
  const float sign = *p[3];
  pieces(rows, kRows, [&](int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) {
      turn(p[0] + i * heads * d, p[1] + i * d, p[2] + i * d, sign, p[4] + i * heads * d, heads, d);
    }
  });
  return 0;
}

// gate, up [T, I] -> silu(gate) * up
int swiglu(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  pieces(count(shapes[0], ndims[0]), 1 << 15, [&](int64_t first, int64_t m) {
    gated(p[0] + first, p[1] + first, p[2] + first, m);
  });
  return 0;
}

// dy, gate, up [T, I] -> dgate, dup
int swiglu_gradient(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  pieces(count(shapes[0], ndims[0]), 1 << 15, [&](int64_t first, int64_t m) {
    gated_gradient(p[0] + first, p[1] + first, p[2] + first, p[3] + first, p[4] + first, m);
  });
  return 0;
}

// ------------------------------------------------------------------------------------------------ attention

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

// One new position of each slot: writes its key and value into the caches and attends to what they hold so far.
// query [B, H * d], key, value [B, K * d], positions int32[B], caches [B, K, S, d] (written), scale [1] -> [B, H * d]
int decode_attention(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const Single every(shapes[0][0]);
  const int32_t *number = every.numbered.data();
  const Slots slots{shapes[0][0], shapes[4][1], shapes[0][1] / (shapes[4][1] * shapes[4][3]), shapes[4][2],
                    shapes[4][3], 0, number, static_cast<const int32_t *>(params[3]), number, every.zeros.data()};
  attend_slots(slots, p[0], p[1], p[2], p[4], p[5], *p[6], p[7], [](int64_t, int64_t) {});
  return 0;
}

namespace {

// Of the arrays from `first` on: a layer's weights, and its caches behind them.
Layer layer_at(void **params, int64_t **shapes, int first, const float *numbers) {
  auto weights = reinterpret_cast<float **>(params) + first;
  return {weights, weights[Layer::WEIGHTS], weights[Layer::WEIGHTS + 1], shapes[first + Layer::WQ][1],
          shapes[first + Layer::W1][0], shapes[first + Layer::WQ][0], shapes[first + Layer::WK][0],
          numbers[0], numbers[1], numbers[2] > 0, numbers[3] > 0};
}

Slots slots_of(const Layer &layer, const int64_t *cache, int64_t base, int64_t rows, const int32_t *slots,
               const int32_t *positions, const int32_t *leaders, const int32_t *prefixes) {
  return {rows, cache[1], layer.width / layer.key_width, cache[2], cache[3], base, slots, positions, leaders, prefixes};
}

}  // namespace

// slots, rows int32[A], limit int32[1], then n times keys or values of prompts [N, K, P, d], then as many caches
// [B, K, S, d]: the first `limit` positions of row rows[i] of each go into slot slots[i] of its cache -> [1]
int admit(int nparam, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  auto whole = reinterpret_cast<int32_t **>(params);
  const int parts = (nparam - 4) / 2;
  const int64_t count = shapes[0][0], limit = whole[2][0];
  pieces(parts * count, 1, [&](int64_t task, int64_t) {
    const int64_t part = 3 + task / count, slot = whole[0][task % count], row = whole[1][task % count];
    const int64_t *from = shapes[part], *to = shapes[part + parts];
    const int64_t heads = to[1], each = std::min({from[2], to[2], limit}) * to[3];
    for (int64_t head = 0; head < heads; ++head) {
      const float *source = p[part] + (row * heads + head) * from[2] * from[3];
      std::copy(source, source + each, p[part + parts] + (slot * heads + head) * to[2] * to[3]);
    }
  });
  p[nparam - 1][0] = 0;
  return 0;
}

// One layer for one new position of each slot; see `decode_layer` in operators.py for the inputs.
int decode_layer(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  enum { X, COS, SIN, POSITIONS, NUMBERS, WEIGHTS, KEYS = WEIGHTS + Layer::WEIGHTS, OUT = KEYS + 2 };
  const int64_t rows = shapes[X][0];
  const Layer layer = layer_at(params, shapes, WEIGHTS, p[NUMBERS]);
  const Single every(rows);
  const int32_t *number = every.numbered.data(), *positions = static_cast<const int32_t *>(params[POSITIONS]);
  const Panels panels(rows);
  thread_local std::vector<float> memory;
  memory.resize(panels.columns * (layer.hidden + layer.scratch_size()));
  float *x = memory.data();
  to_panels(panels, layer.hidden, [&](int64_t row) { return p[X] + row * layer.hidden; }, x);
  decode_rows(layer, slots_of(layer, shapes[KEYS], 0, rows, number, positions, number, every.zeros.data()), panels, p[COS],
              p[SIN], number, x, x + panels.columns * layer.hidden);
  panels.each([&](int64_t first, int64_t width) {
    for (int64_t i = 0; i < panels.used(first, width); ++i) {
      float *row = p[OUT] + (first + i) * layer.hidden;
      for (int64_t j = 0; j < layer.hidden; ++j) row[j] = x[first * layer.hidden + j * width + i];
    }
  });
  return 0;
}

// Several tokens of each slot; see `decode_tokens` in operators.py for the inputs. Slots that have ended are left out.
int decode_tokens(int nparam, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  auto whole = reinterpret_cast<int32_t **>(params);
  enum { IDS, POSITIONS, REMAINING, BANNED, LEADERS, PREFIXES, ENOUGH, UNIFORM, STOPS, EMBED, COS, SIN, NORM, HEAD, NUMBERS, LAYERS };
  const int each = Layer::WEIGHTS + 2, layers = (nparam - LAYERS - 3) / each;
  const int64_t slots = shapes[UNIFORM][0], tokens = shapes[UNIFORM][1], hidden = shapes[EMBED][1];
  const int64_t vocabulary = shapes[HEAD][0], angles = shapes[COS][0], stop_count = shapes[STOPS][0];
  const float *numbers = p[NUMBERS], eps = numbers[1], inverse = numbers[4];
  const bool greedy = numbers[5] > 0;
  int32_t *drawn = whole[nparam - 3];
  float *behaviour = p[nparam - 2], *policy = p[nparam - 1];
  std::fill(drawn, drawn + slots * tokens, -1);
  std::fill(behaviour, behaviour + slots * tokens, 0.0f);
  std::fill(policy, policy + slots * tokens, 0.0f);

  std::vector<int32_t> rows, next(whole[IDS], whole[IDS] + slots), positions(slots), at(slots);
  std::vector<int32_t> leaders(slots), prefixes(slots);
  for (int64_t slot = 0; slot < slots; ++slot) {
    if (whole[REMAINING][slot] > 0) rows.push_back(slot);
  }
  thread_local std::vector<float> memory;
  int64_t most = vocabulary;
  for (int i = 0; i < layers; ++i) {
    most = std::max(most, layer_at(params, shapes, LAYERS + i * each, numbers).scratch_size());
  }
  const int64_t columns = Panels(slots).columns;
  memory.resize(columns * (2 * hidden + most));
  float *x = memory.data(), *h = x + columns * hidden, *rest = h + columns * hidden;
  const size_t enough = std::max(whole[ENOUGH][0], 0);
  const int64_t base = whole[ENOUGH][1];
  for (int64_t t = 0; t < tokens && !rows.empty() && (t == 0 || rows.size() > enough); ++t) {
    const int64_t count = rows.size();
    const Panels panels(count);
    to_panels(panels, hidden, [&](int64_t row) { return p[EMBED] + next[rows[row]] * hidden; }, x);
    for (int64_t i = 0; i < count; ++i) {
      positions[i] = whole[POSITIONS][rows[i]] + t;
      at[i] = std::min<int64_t>(positions[i], angles - 1);
      leaders[i] = whole[LEADERS][rows[i]];
      prefixes[i] = whole[PREFIXES][rows[i]];
    }
    for (int i = 0; i < layers; ++i) {
      const int first = LAYERS + i * each;
      const Layer layer = layer_at(params, shapes, first, numbers);
      const Slots now = slots_of(layer, shapes[first + Layer::WEIGHTS], base, count, rows.data(), positions.data(),
                                 leaders.data(), prefixes.data());
      decode_rows(layer, now, panels, p[COS], p[SIN], at.data(), x, rest);
    }
    norm_panels(panels, x, p[NORM], eps, h, hidden);
    products(panels, h, hidden, {{p[HEAD], nullptr, rest, vocabulary}});
    pieces(count, 1, [&](int64_t i, int64_t) {
      const int64_t slot = rows[i], out = slot * tokens + t;
      const Drawn one = draw(rest + i * vocabulary, vocabulary, p[UNIFORM][out], t < whole[BANNED][slot], whole[STOPS],
                             stop_count, inverse, greedy);
      next[slot] = drawn[out] = one.token;
      behaviour[out] = one.behaviour, policy[out] = one.policy;
    });
    rows.erase(std::remove_if(rows.begin(), rows.end(),
                              [&](int32_t slot) {
                                const int32_t *stops = whole[STOPS];
                                return t + 1 >= whole[REMAINING][slot] ||
                                       std::find(stops, stops + stop_count, next[slot]) != stops + stop_count;
                              }),
               rows.end());
  }
  return 0;
}

// ------------------------------------------------------------------------------------------------ a layer

namespace {

const int64_t kLayerRows = 96;   // of one piece of a layer, which goes through all of its products
const int64_t kInner = 192;      // numbers between the products of a feed-forward half, of one block
const int64_t kNearPieces = 3;   // that go through such a block one after another

// What `layer` and `layer_gradient` begin with: x, the weights, and who sees whom. Padding is not computed: between the
// arrays that come in and those that go out, the rows that count lie without gaps.
struct WholeLayer {
  enum { X, NORM, WQ, WK, WV, BQ, BK, BV, WO, FFN, W1, W3, W2, COS, SIN, ASKING, LENGTHS, DIMS, NUMBERS, END };
  const float *const *p;
  Attention attention;
  int64_t rows, near, skip, hidden, width, key_width, inner, heads, key_heads, d;  // near: rows that ask, behind skip
  std::vector<int64_t> given;                       // of each row that counts, which row of x it is
  std::vector<std::pair<int64_t, int64_t>> unused;  // rows of x that do not count: the first, and how many
  int64_t given_skip;                               // of x, the rows before those of y
  float eps;
  bool has_bias;

  WholeLayer(void **params, int64_t **shapes) : p(reinterpret_cast<const float *const *>(params)) {
    const float *numbers = p[NUMBERS];
    hidden = shapes[X][1], width = shapes[WQ][0], key_width = shapes[WK][0], inner = shapes[W1][0];
    attention = attention_from(static_cast<const int32_t *>(params[DIMS]), static_cast<const int32_t *>(params[LENGTHS]),
                               shapes[LENGTHS][0], width, numbers[0], true);
    rows = attention.rows, skip = attention.skip, near = rows - skip, given_skip = shapes[X][0] - shapes[ASKING][1];
    d = attention.d, heads = width / d, key_heads = key_width / d;
    eps = numbers[1], has_bias = numbers[2] > 0;
    const int64_t far = attention.n * attention.p;
    int64_t begin = 0;
    attention.spans([&](const Span &span) {
      for (int64_t i = 0; i < span.size; ++i) given.push_back(begin + i);
      const int64_t room = begin < far ? attention.p : attention.r;
      if (span.size < room) unused.emplace_back(begin + span.size, room - span.size);
      begin += room;
    });
  }

  // Rows first.. of those that count: from an array like x, whose first row is row `begin` of it, or to it.
  void take(const float *array, int64_t begin, int64_t first, int64_t m, float *target) const {
    for (int64_t i = 0; i < m; ++i) {
      const float *row = array + (given[first + i] - begin) * hidden;
      std::copy(row, row + hidden, target + i * hidden);
    }
  }
  void put(const float *source, int64_t first, int64_t m, float *array, int64_t begin) const {
    for (int64_t i = 0; i < m; ++i) {
      std::copy(source + i * hidden, source + (i + 1) * hidden, array + (given[first + i] - begin) * hidden);
    }
  }
  void zero_unused(float *array, int64_t begin) const {
    for (const auto &[first, size] : unused) {
      float *row = array + (first - begin) * hidden;
      if (first >= begin) std::fill(row, row + size * hidden, 0.0f);
    }
  }
};

}  // namespace

// See `layer` in operators.py. Outputs: y [near, hidden], and what going back needs, without gaps: query, key, value, what
// was attended, the sum before the feed-forward half, gate, up.
int layer(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  using L = WholeLayer;
  const L l(params, shapes);
  auto out = reinterpret_cast<float **>(params) + L::END;
  float *y = out[0], *q = out[1], *k = out[2], *v = out[3], *attended = out[4], *sum = out[5], *gate = out[6], *up = out[7];
  const int64_t hidden = l.hidden, width = l.width, key_width = l.key_width, inner = l.inner, d = l.d;
  pieces(l.rows, even(l.rows, kLayerRows), [&](int64_t first, int64_t m) {
    float *x = scratch(2 * m * hidden), *h = x + m * hidden;
    l.take(l.p[L::X], 0, first, m, x);
    norm_rows(x, l.p[L::NORM], l.eps, h, m, hidden);
    auto linear = [&](int weight, int bias, float *target, int64_t size, int64_t begin) {
      if (begin >= m) return;
      float *own = target + (first + begin) * size;
      gemm('N', 'T', m - begin, size, hidden, 1, h + begin * hidden, hidden, l.p[weight], hidden, 0, own, size);
      add_bias(l.has_bias ? l.p[bias] : nullptr, own, m - begin, size, size);
    };
    const int64_t begin = std::max<int64_t>(l.skip - first, 0);  // the first row that asks
    linear(L::WK, L::BK, k, key_width, 0);
    linear(L::WV, L::BV, v, key_width, 0);
    linear(L::WQ, L::BQ, q - l.skip * width, width, begin);
    for (int64_t i = first; i < first + m; ++i) {
      const float *cos = l.p[L::COS] + l.given[i] * d, *sin = l.p[L::SIN] + l.given[i] * d;
      turn(k + i * key_width, cos, sin, 1, k + i * key_width, l.key_heads, d);
      float *own = q + (i - l.skip) * width;
      if (i >= l.skip) turn(own, cos, sin, 1, own, l.heads, d);
    }
  });
  attend(l.attention, q, k, v, attended);
  l.zero_unused(y, l.given_skip);
  pieces(l.near, even(l.near, kLayerRows), [&](int64_t first, int64_t m) {
    float *h = scratch(m * (hidden + inner)), *act = h + m * hidden;
    float *own = sum + first * hidden, *g = gate + first * inner, *u = up + first * inner;
    l.take(l.p[L::X], 0, l.skip + first, m, own);
    gemm('N', 'T', m, hidden, width, 1, attended + first * width, width, l.p[L::WO], width, 1, own, hidden);
    norm_rows(own, l.p[L::FFN], l.eps, h, m, hidden);
    gemm('N', 'T', m, inner, hidden, 1, h, hidden, l.p[L::W1], hidden, 0, g, inner);
    gemm('N', 'T', m, inner, hidden, 1, h, hidden, l.p[L::W3], hidden, 0, u, inner);
    gated(g, u, act, m * inner);
    std::copy(own, own + m * hidden, h);
    gemm('N', 'T', m, hidden, inner, 1, act, inner, l.p[L::W2], inner, 1, h, hidden);
    l.put(h, l.skip + first, m, y, l.given_skip);
  });
  return 0;
}

// Inputs of `layer`, its outputs but the first, dy [near, hidden], and a buffer for each of the weights, to which their
// gradients are added. Outputs: dx, and memory for what lies between. What was attended, gate and up are overwritten.
int layer_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  using L = WholeLayer;
  const L l(params, shapes);
  auto p = reinterpret_cast<float **>(params);
  enum { Q = L::END, K, V, ATTENDED, SUM, GATE, UP, DY, BUFFERS };
  auto buffer = [&](int weight) { return p[BUFFERS + weight - L::NORM]; };
  float **out = p + BUFFERS + L::W2;  // W2 is the last of the weights, which begin at 1
  float *dx = out[0], *h = out[1], *d_k = out[2], *d_v = out[3], *d_sum = out[4], *act = out[5];
  float *d_gate = p[GATE], *d_up = p[UP], *d_attended = p[ATTENDED];
  float *d_y = dx;  // without gaps; dx is written when it is no longer needed
  const int64_t hidden = l.hidden, width = l.width, key_width = l.key_width, inner = l.inner, d = l.d;
  const int64_t some = even(l.rows, kLayerRows), some_near = even(l.near, kLayerRows);  // rows of a piece
  const int64_t parts = (l.rows + some - 1) / some, near_parts = (l.near + some_near - 1) / some_near;
  std::vector<float> norms(parts * hidden, 0.0f), ffns(near_parts * hidden, 0.0f);

  // The feed-forward half; `h` holds its normed inputs. A block of the weights serves several pieces while it is near.
  const int64_t block = (even(inner, kInner) + kLanes - 1) / kLanes * kLanes;
  pieces(near_parts, std::clamp<int64_t>(near_parts / Team::get().threads(), 1, kNearPieces), [&](int64_t part, int64_t n) {
    const int64_t begin = part * some_near, end = std::min(begin + n * some_near, l.near);
    float *d_h = scratch((end - begin) * hidden + some_near * block), *slope = d_h + (end - begin) * hidden;
    l.take(p[DY], l.given_skip, l.skip + begin, end - begin, d_y + begin * hidden);
    norm_rows(p[SUM] + begin * hidden, p[L::FFN], l.eps, h + begin * hidden, end - begin, hidden);
    for (int64_t j = 0; j < inner; j += block) {
      const int64_t size = std::min(block, inner - j);
      for (int64_t first = begin; first < end; first += some_near) {
        const int64_t m = std::min(some_near, end - first), at = first * inner + j;
        float *gate = d_gate + at, *up = d_up + at, *own = d_h + (first - begin) * hidden;
        gemm('N', 'N', m, size, hidden, 1, d_y + first * hidden, hidden, p[L::W2] + j, inner, 0, slope, size);
        for (int64_t i = 0; i < m; ++i) {
          float *g = gate + i * inner, *u = up + i * inner;
          gated(g, u, act + at + i * inner, size);
          gated_gradient(slope + i * size, g, u, g, u, size);
        }
        gemm('N', 'N', m, hidden, size, 1, gate, inner, p[L::W1] + j * hidden, hidden, j > 0, own, hidden);
        gemm('N', 'N', m, hidden, size, 1, up, inner, p[L::W3] + j * hidden, hidden, 1, own, hidden);
      }
    }
    std::copy(d_y + begin * hidden, d_y + end * hidden, d_sum + begin * hidden);
    for (int64_t first = begin; first < end; first += some_near) {
      const int64_t m = std::min(some_near, end - first), at = first * hidden;
      norm_gradient_rows(d_h + at - begin * hidden, p[SUM] + at, p[L::FFN], l.eps, d_sum + at,
                         ffns.data() + first / some_near * hidden, m, hidden, true);
    }
  });
  weight_gradients({{l.near, d_y, act, buffer(L::W2), hidden, inner},
                    {l.near, d_gate, h, buffer(L::W1), inner, hidden},
                    {l.near, d_up, h, buffer(L::W3), inner, hidden},
                    {l.near, d_sum, p[ATTENDED], buffer(L::WO), hidden, width}},
                   true);

  // Attention.
  pieces(l.near, some_near, [&](int64_t first, int64_t m) {
    gemm('N', 'N', m, width, hidden, 1, d_sum + first * hidden, hidden, p[L::WO], width, 0, d_attended + first * width,
         width);
  });
  float *d_q = act;  // large enough: see `_layer_gradient_shapes`
  attend_gradient(l.attention, p[Q], p[K], p[V], d_attended, d_q, d_k, d_v);
  l.zero_unused(dx, 0);
  pieces(l.rows, some, [&](int64_t first, int64_t m) {
    float *d_h = scratch(3 * m * hidden), *x = d_h + m * hidden, *own = x + m * hidden;
    for (int64_t i = first; i < first + m; ++i) {
      const float *cos = l.p[L::COS] + l.given[i] * d, *sin = l.p[L::SIN] + l.given[i] * d;
      turn(d_k + i * key_width, cos, sin, -1, d_k + i * key_width, l.key_heads, d);
      float *query = d_q + (i - l.skip) * width;
      if (i >= l.skip) turn(query, cos, sin, -1, query, l.heads, d);
    }
    const int64_t begin = std::max<int64_t>(l.skip - first, 0), asking = m - std::min(begin, m);
    l.take(p[L::X], 0, first, m, x);
    norm_rows(x, p[L::NORM], l.eps, h + first * hidden, m, hidden);
    gemm('N', 'N', m, hidden, key_width, 1, d_k + first * key_width, key_width, p[L::WK], hidden, 0, d_h, hidden);
    gemm('N', 'N', m, hidden, key_width, 1, d_v + first * key_width, key_width, p[L::WV], hidden, 1, d_h, hidden);
    std::fill(own, own + m * hidden, 0.0f);
    if (asking) {
      const int64_t at = first + begin - l.skip;
      gemm('N', 'N', asking, hidden, width, 1, d_q + at * width, width, p[L::WQ], hidden, 1, d_h + begin * hidden, hidden);
      std::copy(d_sum + at * hidden, d_sum + (at + asking) * hidden, own + begin * hidden);
    }
    norm_gradient_rows(d_h, x, p[L::NORM], l.eps, own, norms.data() + first / some * hidden, m, hidden, true);
    l.put(own, first, m, dx, 0);
  });
  weight_gradients({{l.near, d_q, h + l.skip * hidden, buffer(L::WQ), width, hidden},
                    {l.rows, d_k, h, buffer(L::WK), key_width, hidden},
                    {l.rows, d_v, h, buffer(L::WV), key_width, hidden}},
                   true);
  if (l.has_bias) {
    add_rows(d_q, l.near, width, buffer(L::BQ));
    add_rows(d_k, l.rows, key_width, buffer(L::BK));
    add_rows(d_v, l.rows, key_width, buffer(L::BV));
  }
  add_rows(norms.data(), parts, hidden, buffer(L::NORM));
  add_rows(ffns.data(), near_parts, hidden, buffer(L::FFN));
  return 0;
}

// ------------------------------------------------------------------------------------------------ token log-probs

namespace {

// What the operators below begin with. Tokens that are not used are not computed: logits of the others lie without gaps.
struct TokenHead {
  enum { HIDDEN, HEAD, TARGETS, USED, INVERSE, END };
  int64_t tokens, hidden, vocabulary;
  const int32_t *targets;
  float inverse;
  std::vector<int64_t> given;   // of each token that is used, which one it is
  const float *rows;            // their hidden states [used, hidden]

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

}  // namespace

// hidden [T, H], head [V, H], targets, used int32[T], inverse temperature [1] -> log_probs, entropy, log of the partition
// sum, [T] each, 0 where not used, and logits [T, V], those that are used without gaps.
int token_log_probs(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  using H = TokenHead;
  const H h(params, shapes);
  auto p = reinterpret_cast<float **>(params);
  float **out = p + H::END, *logits = out[3];
  for (int i = 0; i < 3; ++i) std::fill(out[i], out[i] + h.tokens, 0.0f);
  auto statistics = [&](int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) {
      const float *x = logits + i * h.vocabulary;
      const float top = largest(x, h.vocabulary) * h.inverse;
      float *e = scratch(h.vocabulary);
      const float inverse = h.inverse;
      const float total = sum_over(h.vocabulary, [=](int64_t j) { return e[j] = exponential(x[j] * inverse - top); });
      const float weighted = sum_over(h.vocabulary, [=](int64_t j) { return e[j] * (x[j] * inverse - top); });
      const float log_total = std::log(total);
      const int64_t token = h.given[i];
      out[0][token] = x[h.targets[token]] * h.inverse - top - log_total;
      out[1][token] = log_total - weighted / total;
      out[2][token] = log_total + top;
    }
  };
  if (h.count() >= 2 * kRows) {  // while the logits are near
    pieces(h.count(), even(h.count(), kLayerRows), [&](int64_t i, int64_t m) {
      gemm('N', 'T', m, h.vocabulary, h.hidden, 1, h.rows + i * h.hidden, h.hidden, p[H::HEAD], h.hidden, 0,
           logits + i * h.vocabulary, h.vocabulary);
      statistics(i, m);
    });
  } else {
    linear_any(h.rows, p[H::HEAD], nullptr, logits, h.count(), h.hidden, h.vocabulary);
    pieces(h.count(), 16, statistics);
  }
  return 0;
}

// Inputs of `token_log_probs`, then entropy, log of the partition sum, logits (overwritten), d_log_prob, d_entropy ->
// d_hidden [T, H], d_head [V, H]
int token_log_probs_gradient(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  using H = TokenHead;
  const H h(params, shapes);
  enum { ENTROPY = H::END, LOG_TOTAL, LOGITS, D_LOG_PROB, D_ENTROPY, D_HIDDEN, D_HEAD };
  auto p = reinterpret_cast<float **>(params);
  float *logits = p[LOGITS], *d_hidden = p[D_HIDDEN];
  pieces(h.count(), even(h.count(), kLayerRows), [&](int64_t first, int64_t m) {
    for (int64_t i = first; i < first + m; ++i) {
      float *x = logits + i * h.vocabulary;
      const int64_t token = h.given[i];
      const float entropy = p[ENTROPY][token], log_total = p[LOG_TOTAL][token];
      const float d_log_prob = p[D_LOG_PROB][token], d_entropy = p[D_ENTROPY][token];
#pragma omp simd
      for (int64_t j = 0; j < h.vocabulary; ++j) {
        const float log_prob = x[j] * h.inverse - log_total;
        x[j] = -exponential(log_prob) * (d_log_prob + d_entropy * (log_prob + entropy)) * h.inverse;
      }
      x[h.targets[token]] += d_log_prob * h.inverse;
    }
    gemm('N', 'N', m, h.hidden, h.vocabulary, 1, logits + first * h.vocabulary, h.vocabulary, p[H::HEAD], h.hidden, 0,
         d_hidden + first * h.hidden, h.hidden);
  });
  int64_t end = h.tokens;  // the rows are moved to where they belong, the last one first
  for (int64_t i = h.count() - 1; i >= 0; end = h.given[i], --i) {
    const int64_t token = h.given[i];
    std::fill(d_hidden + (token + 1) * h.hidden, d_hidden + end * h.hidden, 0.0f);
    if (token > i) std::copy(d_hidden + i * h.hidden, d_hidden + (i + 1) * h.hidden, d_hidden + token * h.hidden);
  }
  std::fill(d_hidden, d_hidden + end * h.hidden, 0.0f);
  weight_gradients({{h.count(), logits, h.rows, p[D_HEAD], h.vocabulary, h.hidden}}, false);
  return 0;
}

// ------------------------------------------------------------------------------------------------ optimizer

// tensors of any shapes -> the sum of all squares [1]
int squared_norm(int nparam, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const std::vector<Part> parts = parts_of(nparam - 1, ndims, shapes, [](int i) { return i; });
  std::vector<double> sums(parts.size(), 0.0);
  pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const float *x = p[parts[part].tensor] + parts[part].first;
    for (int64_t j = 0; j < parts[part].size; j += 256) {
      const int64_t n = std::min<int64_t>(256, parts[part].size - j);
      sums[part] += sum_over(n, [own = x + j](int64_t i) { return own[i] * own[i]; });
    }
  });
  *p[nparam - 1] = static_cast<float>(std::accumulate(sums.begin(), sums.end(), 0.0));
  return 0;
}

// numbers [6], layout int32[2 * n]: the first row of each gradient that belongs to its parameter, and whether that
// decays; then n each of parameters, first moments, second moments, gradients (all written) -> [1]
int adamw(int nparam, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  auto p = reinterpret_cast<float **>(params);
  const int32_t *layout = static_cast<const int32_t *>(params[1]);
  const float rate = p[0][0], beta1 = p[0][1], beta2 = p[0][2], eps = p[0][3], decays = p[0][4], scale = p[0][5];
  const int tensors = (nparam - 3) / 4;
  auto own = [](int i) { return 2 + i; };
  const std::vector<Part> parts = parts_of(tensors, ndims, shapes, own);
  pieces(parts.size(), 1, [&](int64_t index, int64_t) {
    const Part &part = parts[index];
    const int at = own(part.tensor);
    const int64_t row = shapes[at][0] ? count(shapes[at], ndims[at]) / shapes[at][0] : 0;
    float *w = p[at] + part.first, *m = p[at + tensors] + part.first, *v = p[at + 2 * tensors] + part.first;
    float *g = p[at + 3 * tensors] + layout[2 * part.tensor] * row + part.first;
    const float decay = layout[2 * part.tensor + 1] ? decays : 0;
#pragma omp simd
    for (int64_t j = 0; j < part.size; ++j) {
      const float slope = g[j] * scale;
      m[j] = beta1 * m[j] + (1 - beta1) * slope;
      v[j] = beta2 * v[j] + (1 - beta2) * slope * slope;
      w[j] -= rate * (m[j] / (std::sqrt(v[j]) + eps) + decay * w[j]);
      g[j] = 0;
    }
  });
  for (int i = 0; i < tensors; ++i) {  // the rows of others
    const int at = own(i) + 3 * tensors;
    if (count(shapes[at], ndims[at]) == count(shapes[own(i)], ndims[own(i)])) continue;
    pieces(count(shapes[at], ndims[at]), kNumbers, [&](int64_t j, int64_t n) { std::fill(p[at] + j, p[at] + j + n, 0); });
  }
  p[nparam - 1][0] = rate;
  return 0;
}

}  // extern "C"
