// The sum of arrays over processes of one host, through memory that all of them have mapped.

#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <utility>
#include <vector>

#include "team.h"

namespace {

// What a rank tells the others, in cache lines of its own: the number of pieces that it has written, of ranks that sleep
// until it writes the next, and of each of the last two pieces how much of its array was left.
struct alignas(64) Told {
  std::atomic<uint32_t> written, asleep;
  int64_t left[2];
};

// A group of ranks as one of them sees it. Each writes its array piece by piece, and adds everybody's: two pieces of each
// rank are there at a time, so that all write the next one while some still read the last.
class SharedGroup {
 public:
  static const int64_t kPiece = 1 << 16;

  static int64_t bytes(int size) { return size * (sizeof(Told) + 2 * kPiece * sizeof(float)); }

  SharedGroup(std::vector<int32_t> ranks, int own, void *memory)
      : ranks(std::move(ranks)), own_(own), told_(static_cast<Told *>(memory)) {}

  // y = sum of all ranks' x, added in their order: the same bits for all. Returns false for ranks out of step.
  bool sum(const float *x, float *y, int64_t count) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    for (; count > 0; count -= kPiece, x += kPiece, y += kPiece) {
      const int64_t size = std::min(count, kPiece);
      const int place = pieces_ % 2;  // the piece here before has been read: all have written the one after it
      std::memcpy(piece(own_, place), x, size * sizeof(float));
      told_[own_].left[place] = count;
      tell(++pieces_);
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        wait(&told_[rank]);
        if (told_[rank].left[place] != count) return false;
      }
      add(place, y, size);
    }
    return true;
  }

  const std::vector<int32_t> ranks;

 private:
  float *piece(int rank, int place) {
    return reinterpret_cast<float *>(told_ + ranks.size()) + (2 * rank + place) * kPiece;
  }

  void add(int place, float *y, int64_t size) {
    const int64_t step = 2048;  // stays in the nearest cache until all have been added
    for (int64_t i = 0; i < size; i += step) {
      const int64_t n = std::min(step, size - i);
      const float *first = piece(0, place) + i;
      for (size_t rank = 1; rank < ranks.size(); ++rank) {
        std::transform(first, first + n, piece(rank, place) + i, y + i, std::plus<float>());
        first = y + i;
      }
    }
  }

  void tell(uint32_t pieces) {
    Told &own = told_[own_];
    own.written = pieces;
    if (own.asleep > 0) syscall(SYS_futex, &own.written, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Until the other one has written as many pieces as this rank. It sleeps soon: there may be more ranks than cores.
  void wait(Told *other) {
    for (int i = 0;; ++i) {
      const uint32_t written = other->written;
      if (static_cast<int32_t>(written - pieces_) >= 0) return;
      if (i < kLook) {
        pause(i);
        continue;
      }
      ++other->asleep;
      syscall(SYS_futex, &other->written, FUTEX_WAIT, written, nullptr, nullptr, 0);  // at once if it changed
      --other->asleep;
    }
  }

  static const int kLook = 1 << 10;

  const int own_;
  Told *const told_;
  uint32_t pieces_ = 0;
  std::mutex mutex_;
};

std::vector<SharedGroup *> shared_groups;  // never deleted: graphs find them by their ranks

}  // namespace

extern "C" {

int64_t shared_group_bytes(int size) { return SharedGroup::bytes(size); }

// ranks: global ones in order, of which this is number `own`. file: of `shared_group_bytes` zeros, the same for all ranks.
// Returns 0, or the number of the error.
int join_shared_group(const int32_t *ranks, int size, int own, int file) {
  void *memory = mmap(nullptr, SharedGroup::bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return errno;
  shared_groups.push_back(new SharedGroup({ranks, ranks + size}, own, memory));
  return 0;
}

// x [...], ranks int32[size] of a group that this process has joined -> sum of x over the group
int shared_sum(int, void **params, int *ndims, int64_t **shapes, const char **, void *, void *) {
  const auto ranks = static_cast<const int32_t *>(params[1]);
  for (SharedGroup *group : shared_groups) {
    if (!std::equal(group->ranks.begin(), group->ranks.end(), ranks, ranks + shapes[1][0])) continue;
    const int64_t total = count(shapes[0], ndims[0]);
    return group->sum(static_cast<const float *>(params[0]), static_cast<float *>(params[2]), total) ? 0 : 2;
  }
  return 1;
}

}  // extern "C"
