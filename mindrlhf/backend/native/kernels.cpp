// Fused operators of the transformer and its losses for MindSpore's CPU backend; `decoding.cpp` has those of decode steps.
// Arrays are float32. Factors of products are float32, or bfloat16 in operators whose names end in _bfloat16; products
// accumulate in float32.
//
// An operator (`entry_points.h`) takes its inputs, then its outputs, as pointers with their shapes. Arrays are dense and
// row-major. One thread computes each output row in one order, so results do not depend on the number of threads. The
// Python side (`operators.py`) has the shapes of results, and `backend/operators.py` the meaning.

#include "attention_half.h"
#include "experts_half.h"
#include "feed_forward_half.h"
#include "head.h"
#include "optimizer.h"
#include "optimizer_state.h"
#include "shared_sum.h"
#include "small.h"
#include "stream.h"

extern "C" {

// Returns 0 if oneDNN's matrix product is available, else 1.
int usable() { return library_gemm<float> ? 0 : 1; }

// Returns 1 if the processor multiplies bfloat16 numbers: oneDNN reports it, unless ONEDNN_MAX_CPU_ISA forbids it. Bits mean
// other instructions on aarch64.
int multiplies_bfloat16() {
#if defined(__x86_64__)
  const auto instructions = find_in_library<int (*)()>("dnnl_get_effective_cpu_isa");
  return library_gemm<BFloat16> && instructions && (instructions() & 0xe7) == 0xe7;
#else
  return 0;
#endif
}

}  // extern "C"
