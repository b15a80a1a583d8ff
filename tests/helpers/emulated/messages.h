// Calls of operators between two processes: whole numbers and arrays through a pair of pipes.

#pragma once

#include <unistd.h>
#include <cstdint>
#include <string>
#include <vector>

// The two ends of a process. A broken pipe ends it in `failed`.
struct Pipes {
  int from, to;
  void (*failed)();

  void read(void *data, int64_t bytes) const {
    for (auto at = static_cast<char *>(data); bytes > 0;) {
      const int64_t now = ::read(from, at, bytes);
      if (now <= 0) failed();
      at += now, bytes -= now;
    }
  }
  void write(const void *data, int64_t bytes) const {
    for (auto at = static_cast<const char *>(data); bytes > 0;) {
      const int64_t now = ::write(to, at, bytes);
      if (now <= 0) failed();
      at += now, bytes -= now;
    }
  }
  int64_t read_number() const {
    int64_t number;
    read(&number, sizeof(number));
    return number;
  }
  void write_number(int64_t number) const { write(&number, sizeof(number)); }
};

// Numbers have 32 bits in all arrays of operators.
inline int64_t bytes_of(const int64_t *shape, int dimensions) {
  int64_t bytes = 4;
  for (int i = 0; i < dimensions; ++i) bytes *= shape[i];
  return bytes;
}
