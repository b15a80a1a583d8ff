// A copy that leaves caches alone.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

extern "C" {

// Copies `count` bytes. What is written goes to memory past the caches, without being read first: it costs two thirds of a
// usual copy's traffic, and pays for more bytes than caches hold.
void stream_copy(const char *from, int64_t count, char *to) {
#if defined(__AVX2__)
  constexpr int64_t kLine = 64;
  const int64_t head = std::min<int64_t>(count, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, head);
  int64_t i = head;
  for (; i + kLine <= count; i += kLine) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from + i + kLine / 2));
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i *>(to + i + kLine / 2), high);
  }
  std::memcpy(to + i, from + i, count - i);
  _mm_sfence();
#else
  std::memcpy(to, from, count);
#endif
}

}  // extern "C"
