// Names that C++ and Python share: `names.py` reads the structs here, and fills them by their members' names.
//
// Structs of numbers are one small array each. Structs of pointers are arrays that follow each other among an operator's
// inputs. Of a half's weights those that the model does not have are left out there, and null here.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Of a half of a layer. prefix, samples, completion: positions of a prompt, samples of each, positions of a completion.
// asking: which rows the output has, 0 none, 1 those of completions, 2 all. residual: whether x is added to the output.
// weights, buffers: which of the half's weights, and of the buffers of their gradients, are given: a bit each.
struct HalfNumbers {
  int32_t prefix, samples, completion, asking, residual, head_size, weights, buffers;
  float scale, epsilon;
};

// Of generation. greedy: whether the largest logit is taken.
struct DecodeNumbers {
  int32_t greedy;
  float scale, epsilon, inverse_temperature;
};

struct NormNumbers {
  float epsilon;
};

// limit: positions that are copied of a prompt.
struct AdmitNumbers {
  int32_t limit;
};

// Of an update. scale: what gradients are multiplied by.
struct UpdateNumbers {
  float rate, beta1, beta2, epsilon, decay, scale;
};

// norm [hidden]; wq [queries, hidden], wk, wv [keys, hidden], and their biases; norms of a head; wo [hidden, queries];
// adapters of the maps (see `LowRank`), and a scale for each of wq, wk, wv, wo
template <typename Array>
struct AttentionWeights {
  Array norm, wq, wk, wv, wq_bias, wk_bias, wv_bias, q_norm, k_norm, wo;
  Array wq_a, wq_b, wk_a, wk_b, wv_a, wv_b, wo_a, wo_b, scales;
};

// norm [hidden]; w1, w3 [inner, hidden]: of gate and up; w2 [hidden, inner]; adapters, and a scale for each of w1, w3, w2
template <typename Array>
struct FeedForwardWeights {
  Array norm, w1, w3, w2;
  Array w1_a, w1_b, w3_a, w3_b, w2_a, w2_b, scales;
};

using Input = const float *;
using Output = float *;

using Shape = const int64_t *;

// A half's arrays, their shapes and numbers of dimensions; null or 0 for those that are not given.
template <template <typename> class Names, typename Array>
struct Given {
  Names<Array> arrays;
  Names<Shape> shapes;
  Names<int> dimensions;
};

// An operator's inputs and then its outputs, read one struct after another.
class Arguments {
 public:
  Arguments(void **params, int *ndims, int64_t **shapes) : params_(params), ndims_(ndims), shapes_(shapes) {}

  // The next arrays, as members of T, all of which are pointers.
  template <typename T>
  T next() {
    return read<T>(params_, -1);
  }

  // The next arrays of a half, of which the bits of `which` are given.
  template <template <typename> class Names, typename Array>
  Given<Names, Array> next(int32_t which) {
    const int first = at_;
    const auto shapes = read<Names<Shape>>(shapes_, which);
    at_ = first;
    const auto dimensions = read<Names<int>>(ndims_, which);
    at_ = first;
    return {read<Names<Array>>(params_, which), shapes, dimensions};
  }

  // The shape of array number `index` of all.
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

// Where a member of a struct of pointers lies among them.
#define INDEX(type, member) static_cast<int>(offsetof(type, member) / sizeof(void *))

}  // namespace
