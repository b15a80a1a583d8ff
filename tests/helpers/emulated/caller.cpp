// Operators that another processor's build computes: the same entry points as the library's, whose arrays go to an emulated
// process (`callee.cpp`) and come back, those that an operator changes in place too.
//
// COMMAND: the words that start the callee. OPERATORS: FORWARD(name) for each entry point.

#include <fcntl.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "messages.h"

namespace {

void failed() {
  std::fprintf(stderr, "the emulated operators have ended\n");
  std::abort();
}

// Starts the callee, which ends with this process.
Pipes started() {
  int there[2], back[2];
  if (pipe2(there, O_CLOEXEC) || pipe2(back, O_CLOEXEC)) failed();
  const pid_t child = fork();
  if (child < 0) failed();
  if (child == 0) {
    dup2(there[0], 0), dup2(back[1], 1);
    const char *words[] = {COMMAND, nullptr};
    execv(words[0], const_cast<char **>(words));
    _exit(127);
  }
  close(there[0]), close(back[1]);
  return {back[0], there[1], failed};
}

int64_t forward(const char *name, int count, void **arrays, const int *dimensions, int64_t **shapes) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  static const Pipes pipes = started();
  const int64_t length = std::strlen(name);
  pipes.write_number(length), pipes.write(name, length), pipes.write_number(count);
  for (int i = 0; i < count; ++i) {
    pipes.write_number(dimensions[i]), pipes.write(shapes[i], dimensions[i] * sizeof(int64_t));
    pipes.write(arrays[i], bytes_of(shapes[i], dimensions[i]));
  }
  const int64_t result = pipes.read_number();
  for (int i = 0; i < count; ++i) {
    std::vector<char> found(bytes_of(shapes[i], dimensions[i]));
    pipes.read(found.data(), found.size());
    // Other threads may read what is not changed.
    if (std::memcmp(arrays[i], found.data(), found.size()) != 0) std::memcpy(arrays[i], found.data(), found.size());
  }
  return result;
}

void pack(const char *name, const float *from, int64_t rows, int64_t in, int64_t words, int32_t *to) {
  int64_t given[] = {rows, in}, packed[] = {rows, words}, *shapes[] = {given, packed};
  const int dimensions[] = {2, 2};
  void *arrays[] = {const_cast<float *>(from), to};
  forward(name, 2, arrays, dimensions, shapes);
}

}  // namespace

extern "C" {

int usable() { return forward("usable", 0, nullptr, nullptr, nullptr); }
int multiplies_bfloat16() { return forward("multiplies_bfloat16", 0, nullptr, nullptr, nullptr); }

#define FORWARD(name)                                                                                        \
  int name(int count, void **arrays, int *dimensions, int64_t **shapes, const char **, void *, void *) {     \
    return forward(#name, count, arrays, dimensions, shapes);                                                \
  }
OPERATORS

// The callee finds the number of inputs in the shape of an array without numbers.
#define PACKING(kind)                                                                                   \
  int64_t row_words_##kind(int64_t in) {                                                                \
    int64_t shape[] = {in, 0}, *shapes[] = {shape};                                                     \
    const int dimensions[] = {2};                                                                       \
    void *arrays[] = {shape};                                                                           \
    return forward("row_words_" #kind, 1, arrays, dimensions, shapes);                                  \
  }                                                                                                     \
  void pack_##kind(const float *from, int64_t rows, int64_t in, int32_t *to) {                          \
    pack("pack_" #kind, from, rows, in, row_words_##kind(in), to);                                      \
  }
PACKING(bfloat16)
PACKING(int8)

}  // extern "C"
