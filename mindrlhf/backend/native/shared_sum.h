// The sum of arrays over processes of one host, through memory that all processes have mapped.

#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "entry_points.h"
#include "team.h"

namespace {

// The state of a rank that other ranks read, in its own cache lines: the number of pieces that it has written; the number of
// ranks that sleep until it writes the next one; for each of the last two, the rest of its array in numbers, from it on.
struct alignas(64) Told {
  std::atomic<uint32_t> written, asleep;
  int64_t left[2];
};

// A group of ranks, seen from one rank. Each rank writes its array piece by piece, and adds the pieces of all ranks. Memory
// holds two pieces per rank, so that ranks can write the next piece while other ranks still read the last one.
class SharedGroup {
 public:
  static const int64_t kPiece = 1 << 16;

  static int64_t bytes(int size) { return size * (sizeof(Told) + 2 * kPiece * sizeof(float)); }

  SharedGroup(std::vector<int32_t> ranks, int own, void *memory)
      : ranks(std::move(ranks)), own_(own), told_(static_cast<Told *>(memory)) {}

  // Sums x over all ranks into y, in the order of ranks: the same bits on all ranks. Returns false for ranks out of step, and
  // when a rank has not come for kPatience seconds.
  bool sum(const float *x, float *y, int64_t count) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    for (; count > 0; count -= kPiece, x += kPiece, y += kPiece) {
      const int64_t size = std::min(count, kPiece);
      const int place = pieces_ % 2;  // the old piece here has been read: all ranks have written the next one
      std::memcpy(piece(own_, place), x, size * sizeof(float));
      told_[own_].left[place] = count;
      tell(++pieces_);
      for (size_t rank = 0; rank < ranks.size(); ++rank) {
        if (!wait(&told_[rank]) || told_[rank].left[place] != count) return false;
      }
      add(place, y, size);
    }
    return true;
  }

  // Wakes who sleeps, again and again, so that they look at the clock.
  [[noreturn]] void nudge() {
    for (;;) {
      std::this_thread::sleep_for(kNap);
      for (size_t rank = 0; rank < ranks.size(); ++rank) wake(&told_[rank]);
    }
  }

  const std::vector<int32_t> ranks;

 private:
  using Clock = std::chrono::steady_clock;

  float *piece(int rank, int place) {
    return reinterpret_cast<float *>(told_ + ranks.size()) + (2 * rank + place) * kPiece;
  }

  void add(int place, float *y, int64_t size) {
    const int64_t step = 2048;  // stays in the L1 cache until all ranks' pieces are added
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
    wake(&own);
  }

  void wake(Told *told) {
    if (told->asleep > 0) syscall(SYS_futex, &told->written, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Waits until another rank has written as many pieces as this rank. Sleeps soon: there may be more ranks than cores. Returns
  // false after kPatience seconds. A sleep has no limit, which would set a timer: on a virtual machine that takes as long as
  // a small sum. `nudge` ends it.
  bool wait(Told *other) {
    Clock::time_point begun;
    for (int i = 0;; ++i) {
      const uint32_t written = other->written;
      if (static_cast<int32_t>(written - pieces_) >= 0) return true;
      if (i < kLook) {
        pause(i);
        continue;
      }
      if (i == kLook) begun = Clock::now();
      ++other->asleep;
      syscall(SYS_futex, &other->written, FUTEX_WAIT, written, nullptr, nullptr, 0);  // returns at once if it changed
      --other->asleep;
      if (Clock::now() - begun >= kPatience) return false;
    }
  }

  static const int kLook = 1 << 10;
  static constexpr std::chrono::seconds kNap{60}, kPatience{MESSAGE_LIMIT_S};

  const int own_;
  Told *const told_;
  uint32_t pieces_ = 0;
  std::mutex mutex_;
};

std::vector<SharedGroup *> shared_groups;  // never deleted: graphs find groups by their ranks

}  // namespace

extern "C" {

int64_t shared_group_bytes(int size) { return SharedGroup::bytes(size); }

// Joins a group. ranks: global ranks in order; this process has index `own`. file: `shared_group_bytes` zeros, the same file
// for all ranks. Returns 0, or the error number.
int join_shared_group(const int32_t *ranks, int size, int own, int file) {
  void *memory = mmap(nullptr, SharedGroup::bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) return errno;
  auto *group = new SharedGroup({ranks, ranks + size}, own, memory);
  shared_groups.push_back(group);
  std::thread(&SharedGroup::nudge, group).detach();
  return 0;
}

}  // extern "C"

// Sums over a group: x [...], ranks int32[size] of a group that this process has joined -> the sum of x.
ENTRY_POINT(shared_sum) {
  const auto ranks = static_cast<const int32_t *>(params[1]);
  for (SharedGroup *group : shared_groups) {
    if (!std::equal(group->ranks.begin(), group->ranks.end(), ranks, ranks + shapes[1][0])) continue;
    const int64_t total = count(shapes[0], ndims[0]);
    return group->sum(static_cast<const float *>(params[0]), static_cast<float *>(params[2]), total) ? 0 : 2;
  }
  return 1;
}
