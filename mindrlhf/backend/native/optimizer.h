// The optimizer: the norm of gradients, and the update.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "lanes.h"
#include "names.h"
#include "team.h"

namespace {

const int64_t kNumbers = 1 << 14;  // numbers per piece of a parameter

struct Part {
  int tensor;
  int64_t first, size;
};

// Cuts all tensors into pieces. at(i): the index of tensor i among the arrays.
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

// Computes the sum of all squares: tensors of any shapes -> [1].
ENTRY_POINT(squared_norm) {
  auto p = reinterpret_cast<float **>(params);
  const std::vector<Part> parts = parts_of(nparam - 1, ndims, shapes, [](int i) { return i; });
  std::vector<double> sums(parts.size(), 0.0);
  parallel_pieces(parts.size(), 1, [&](int64_t part, int64_t) {
    const float *x = p[parts[part].tensor] + parts[part].first;
    for (int64_t j = 0; j < parts[part].size; j += 256) {
      const int64_t n = std::min<int64_t>(256, parts[part].size - j);
      sums[part] += sum_over(n, [own = x + j](int64_t i) INLINE { return own[i] * own[i]; });
    }
  });
  *p[nparam - 1] = static_cast<float>(std::accumulate(sums.begin(), sums.end(), 0.0));
  return 0;
}

// Updates parameters: UpdateNumbers; layout int32[2 * n]: for each parameter the first row of its gradient that belongs to
// it, and whether it decays; n each of parameters, first moments, second moments, gradients (all overwritten) -> [1].
ENTRY_POINT(adamw) {
  auto p = reinterpret_cast<float **>(params);
  const int32_t *layout = static_cast<const int32_t *>(params[1]);
  const UpdateNumbers n = *static_cast<const UpdateNumbers *>(params[0]);
  const int tensors = (nparam - 3) / 4;
  auto own = [](int i) { return 2 + i; };
  const std::vector<Part> parts = parts_of(tensors, ndims, shapes, own);
  parallel_pieces(parts.size(), 1, [&](int64_t index, int64_t) {
    const Part &part = parts[index];
    const int at = own(part.tensor);
    const int64_t row = shapes[at][0] ? count(shapes[at], ndims[at]) / shapes[at][0] : 0;
    float *w = p[at] + part.first, *m = p[at + tensors] + part.first, *v = p[at + 2 * tensors] + part.first;
    float *g = p[at + 3 * tensors] + layout[2 * part.tensor] * row + part.first;
    const float decay = layout[2 * part.tensor + 1] ? n.decay : 0;
#pragma omp simd
    for (int64_t j = 0; j < part.size; ++j) {
      const float slope = g[j] * n.scale;
      m[j] = n.beta1 * m[j] + (1 - n.beta1) * slope;
      v[j] = n.beta2 * v[j] + (1 - n.beta2) * slope * slope;
      w[j] -= n.rate * (m[j] / (std::sqrt(v[j]) + n.epsilon) + decay * w[j]);
      g[j] = 0;
    }
  });
  for (int i = 0; i < tensors; ++i) {  // zeroes gradient rows outside of the parameter
    const int at = own(i) + 3 * tensors;
    if (count(shapes[at], ndims[at]) == count(shapes[own(i)], ndims[own(i)])) continue;
    parallel_pieces(count(shapes[at], ndims[at]), kNumbers,
                    [&](int64_t j, int64_t size) { std::fill(p[at] + j, p[at] + j + size, 0); });
  }
  p[nparam - 1][0] = n.rate;
  return 0;
}
