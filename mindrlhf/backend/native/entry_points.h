// The declaration of operators: `names.py` reads from the headers which operators these macros define, and for which dtypes.
//
// Every entry point has the signature of MindSpore's ahead-of-time custom operators.

#pragma once

// Begins the definition of an operator with one entry point.
#define ENTRY_POINT(name) \
  extern "C" int name(int nparam, void **params, int *ndims, int64_t **shapes, const char **, void *, void *)

// Defines the entry points of the operator name_of<Number>: `name` for float and `name_bfloat16` for bfloat16 factors.
#define ENTRY_POINTS(name)                                                              \
  ENTRY_POINT(name) { return name##_of<float>(params, ndims, shapes); }                 \
  ENTRY_POINT(name##_bfloat16) { return name##_of<BFloat16>(params, ndims, shapes); }

// Defines the entry points of a decode step's operator: for weights of float, bfloat16 and int8 numbers.
#define DECODE_ENTRY_POINTS(name) \
  ENTRY_POINTS(name)              \
  ENTRY_POINT(name##_int8) { return name##_of<Int8>(params, ndims, shapes); }
