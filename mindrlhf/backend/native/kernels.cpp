// Fused operators of the transformer and its losses for MindSpore's CPU backend, float32.
//
// Every entry point has the signature of MindSpore's ahead-of-time custom operators: inputs, then outputs, as pointers
// with their shapes. Arrays are dense and row-major. Each output row is computed by one thread in one order, so that
// results do not depend on the number of threads. The Python side (`operators.py`) has the shapes and the meaning.

#include "attention_half.h"
#include "decode.h"
#include "feed_forward_half.h"
#include "head.h"
#include "optimizer.h"
#include "small.h"

extern "C" {

// 0 when there is a matrix product to build on.
int usable() { return library_gemm ? 0 : 1; }

}  // extern "C"
