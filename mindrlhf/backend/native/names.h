// Names that C++ and Python share: `names.py` reads the structs in this file, and fills them by their members' names.
//
// A struct of numbers is one small array. A struct of pointers is a sequence of arrays among an operator's inputs. Weights
// of a half that the model does not have are left out of the inputs, and are null here.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "entry_points.h"

namespace {

// The numbers of a half. prefix, samples, completion: most positions of a prompt, completions per prompt, most positions of
// a completion. asking: the rows of the output: 0 none, 1 completions, 2 all. residual: whether x is added to the output.
// together: how many prompts attend to each other in both directions; 0: each to itself, causally. weights, buffers: one bit
// for each of the half's weights: whether it, or the buffer of its gradient, is given.
struct HalfNumbers {
  int32_t prefix, samples, completion, asking, residual, head_size, together, weights, buffers;
  float scale, epsilon;
};

// The numbers of the experts of a half. weights, buffers: as above.
struct ExpertNumbers {
  int32_t weights, buffers;
};

// The numbers of a half with experts in a decode step. chosen: experts of a token; normalises: the shares of a token's experts
// are divided by their sum; layer: its place in the cache of the routing, -1 if it is not recorded.
struct DecodeExpertNumbers {
  int32_t residual, weights, chosen, normalises, layer;
  float epsilon;
};

// The numbers of generation. chosen, normalises: as above; records: the routing is written to its cache.
struct DecodeNumbers {
  float scale, epsilon;
  int32_t chosen, normalises, records;
};

struct NormNumbers {
  float epsilon;
};

// limit: how many positions of a prompt are copied.
struct AdmitNumbers {
  int32_t limit;
};

// The numbers of an update. scale: the factor of the gradients.
struct UpdateNumbers {
  float rate, beta1, beta2, epsilon, decay, scale;
};

// norm [hidden]; wq [queries, hidden], wk, wv [keys, hidden], and their biases; norms of query and key heads; wo [hidden,
// queries] and its bias; adapters of the maps (see `LowRank`), and a scale for each of wq, wk, wv, wo
template <typename Array>
struct AttentionWeights {
  Array norm, wq, wk, wv, wq_bias, wk_bias, wv_bias, q_norm, k_norm, wo, wo_bias;
  Array wq_a, wq_b, wk_a, wk_b, wv_a, wv_b, wo_a, wo_b, scales;
};

// norm [hidden]; w1 (gate), w3 (up) [inner, hidden]; w2 (down) [hidden, inner]; their biases, not in decode steps; adapters, a
// scale for each of w1, w3, w2. With experts: router [experts, hidden], and the maps and adapters are [experts, ...].
template <typename Array>
struct FeedForwardWeights {
  Array norm, router, w1, w3, w2, w1_bias, w3_bias, w2_bias;
  Array w1_a, w1_b, w3_a, w3_b, w2_a, w2_b, scales;
};

using Input = const float *;
using Output = float *;

using Shape = const int64_t *;

// A half's arrays, their shapes and numbers of dimensions; null or 0 for arrays that are not given.
template <template <typename> class Names, typename Array>
struct Given {
  Names<Array> arrays;
  Names<Shape> shapes;
  Names<int> dimensions;
};

// Reads an operator's inputs and then its outputs, one struct after another.
class Arguments {
 public:
  Arguments(void **params, int *ndims, int64_t **shapes) : params_(params), ndims_(ndims), shapes_(shapes) {}

  // Reads the next arrays as members of T; all members are pointers.
  template <typename T>
  T next() {
    return read<T>(params_, -1);
  }

  // Reads the next arrays of a half. which: one bit per member, 1 if it is given.
  template <template <typename> class Names, typename Array>
  Given<Names, Array> next(int32_t which) {
    const int first = at_;
    const auto shapes = read<Names<Shape>>(shapes_, which);
    at_ = first;
    const auto dimensions = read<Names<int>>(ndims_, which);
    at_ = first;
    return {read<Names<Array>>(params_, which), shapes, dimensions};
  }

  // Returns the shape of array number `index` among all inputs and outputs.
  Shape shape(int index) const { return shapes_[index]; }

 private:
  template <typename T, typename Each>
  T read(Each *from, int32_t which) {
    const int count = sizeof(T) / sizeof(Each);
    Each found[count];
    for (int i = 0; i < count; ++i) found[i] = which >> std::min(i, 31) & 1 ? from[at_++] : Each{};
    T members;
    std::memcpy(&members, found, sizeof(T));
    return members;
  }

  void **params_;
  int *ndims_;
  int64_t **shapes_;
  int at_ = 0;
};

// The index of a member in a struct of pointers.
#define INDEX(type, member) static_cast<int>(offsetof(type, member) / sizeof(void *))

}  // namespace
