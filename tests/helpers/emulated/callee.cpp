// Runs the operators of a library for `caller.cpp`: reads their arrays from the standard input and writes them all back.

#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>

#include "messages.h"

namespace {

using Operator = int (*)(int, void **, int *, int64_t **, const char **, void *, void *);

int64_t call(void *function, const std::string &name, std::vector<void *> &arrays, std::vector<int> &dimensions,
             std::vector<int64_t *> &shapes) {
  if (arrays.empty()) return reinterpret_cast<int (*)()>(function)();
  if (name.rfind("row_words_", 0) == 0) return reinterpret_cast<int64_t (*)(int64_t)>(function)(shapes[0][0]);
  if (name.rfind("pack_", 0) == 0) {
    const auto pack = reinterpret_cast<void (*)(const float *, int64_t, int64_t, int32_t *)>(function);
    pack(static_cast<const float *>(arrays[0]), shapes[0][0], shapes[0][1], static_cast<int32_t *>(arrays[1]));
    return 0;
  }
  const auto run = reinterpret_cast<Operator>(function);
  return run(arrays.size(), arrays.data(), dimensions.data(), shapes.data(), nullptr, nullptr, nullptr);
}

}  // namespace

int main(int, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const Pipes pipes{0, 1, [] { std::exit(0); }};  // the caller has ended
  while (true) {
    std::string name(pipes.read_number(), ' ');
    pipes.read(name.data(), name.size());
    const int64_t count = pipes.read_number();
    std::vector<std::vector<int64_t>> sizes(count);
    std::vector<std::vector<char>> contents(count);
    std::vector<void *> arrays;
    std::vector<int> dimensions;
    std::vector<int64_t *> shapes;
    for (int64_t i = 0; i < count; ++i) {
      dimensions.push_back(pipes.read_number());
      sizes[i].resize(dimensions[i]);
      pipes.read(sizes[i].data(), dimensions[i] * sizeof(int64_t));
      contents[i].resize(bytes_of(sizes[i].data(), dimensions[i]));
      pipes.read(contents[i].data(), contents[i].size());
      arrays.push_back(contents[i].data()), shapes.push_back(sizes[i].data());
    }
    void *function = dlsym(library, name.c_str());
    if (!function) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    pipes.write_number(call(function, name, arrays, dimensions, shapes));
    for (const auto &content : contents) pipes.write(content.data(), content.size());
  }
}
