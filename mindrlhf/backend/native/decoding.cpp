// Fused operators of decode steps, with the rules of `kernels.cpp`: two sources compile in half the time of one.

#include "decode.h"
