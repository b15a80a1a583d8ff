// Fused operators of the transformer and its losses for MindSpore's CPU backend: float32 arrays, and products of float32
// or, under names that end in _bfloat16, of bfloat16 numbers that are added up in float32.
//
// Every entry point has the signature of MindSpore's ahead-of-time custom operators: inputs, then outputs, as pointers
// with their shapes. Arrays are dense and row-major. Each output row is computed by one thread in one order, so that
// results do not depend on the number of threads. The Python side (`operators.py`) has the shapes and the meaning.

#include "attention_half.h"
#include "decode.h"
#include "feed_forward_half.h"
#include "head.h"
#include "optimizer.h"
#include "shared_sum.h"
#include "small.h"

extern "C" {

// 0 when there is a matrix product to build on.
int usable() { return library_gemm<float> ? 0 : 1; }

// 1 where the processor multiplies bfloat16 numbers: oneDNN's bit for that, unless ONEDNN_MAX_CPU_ISA forbids it.
int multiplies_bfloat16() {
  const auto instructions = find_in_library<int (*)()>("dnnl_get_effective_cpu_isa");
  return library_gemm<BFloat16> && instructions && (instructions() & 0xe7) == 0xe7;
}

}  // extern "C"
