// Names that C++ and Python share: `names.py` reads the structs here, and fills them by their members' names.
//
// Structs of numbers are one small array each. Structs of pointers are arrays that follow each other among an operator's
// inputs; one that the model does not have is empty there, and null here.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Of a half of a layer. prefix, samples, completion: positions of a prompt, samples of each, positions of a completion.
// asking: which rows the output has, 0 none, 1 those of completions, 2 all. residual: whether x is added to the output.
struct HalfNumbers {
  int32_t prefix, samples, completion, asking, residual, head_size;
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

// The arrays from `first` on as members of T, all of which are pointers. MindSpore does not tell the shapes of parameters
// that are only written to: those have no dimensions here.
template <typename T>
T arrays_at(void **params, const int *ndims, int64_t **shapes, int first = 0) {
  const int count = sizeof(T) / sizeof(void *);
  void *found[count];
  for (int i = 0; i < count; ++i) found[i] = ndims[first + i] && shapes[first + i][0] == 0 ? nullptr : params[first + i];
  T members;
  std::memcpy(&members, found, sizeof(T));
  return members;
}

// How many arrays T has, and where one of its members lies among them.
template <typename T>
constexpr int arrays_of() {
  return sizeof(T) / sizeof(void *);
}

#define INDEX(type, member) static_cast<int>(offsetof(type, member) / sizeof(void *))

}  // namespace
