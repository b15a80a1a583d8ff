// The threads that share the work of an operator.

#pragma once

#include <linux/futex.h>
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

// Waits a moment; i: the iteration of the polling loop that calls it.
void pause(int i) {
  if (i % 64 == 63) {
    sched_yield();  // another thread may need this core
  } else {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
}

// Returns the number of threads that this process may use. OpenMP's own number is that of the calling thread, and MindSpore
// sets it to 1 in the thread that runs the operators of a process started by msrun.
int usable_threads() {
  const char *given = std::getenv("OMP_NUM_THREADS");
  const int number = given ? std::atoi(given) : 0;
  return number > 0 ? number : omp_get_num_procs();
}

// Threads that share the pieces of an operator with the calling thread. The next operator follows within microseconds.
// OpenMP threads fall asleep in this time, and waking a thread takes longer than many pieces; threads of this team poll for
// work for a while before they sleep. The caller never waits for a thread that has not begun.
class ThreadTeam {
 public:
  static ThreadTeam &get() {
    static ThreadTeam *team = new ThreadTeam(usable_threads() - 1);  // never deleted: threads run until the process ends
    return *team;
  }

  int threads() const { return helpers_ + 1; }

  // Calls body(i) for 0 <= i < count, in any order. The team helps one operator at a time; others run on their own thread.
  template <typename Body>
  void share(int64_t count, const Body &body) {
    std::unique_lock<std::mutex> mine(owner_, std::try_to_lock);
    if (helpers_ == 0 || !mine.owns_lock()) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run_ = [](const void *b, int64_t i) { (*static_cast<const Body *>(b))(i); };
    body_ = &body, count_ = count, next_ = 0;
    ++job_;  // odd numbers: there is work
    if (asleep_ > 0) syscall(SYS_futex, &job_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    work();
    ++job_;
    for (int i = 0; inside_ > 0; ++i) pause(i);
  }

 private:
  explicit ThreadTeam(int helpers) : helpers_(helpers) {
    for (int i = 0; i < helpers; ++i) std::thread([this] { help(); }).detach();
  }

  void work() {
    for (int64_t i = next_++; i < count_; i = next_++) run_(body_, i);
  }

  void help() {
    for (uint32_t done = 0;;) {
      const uint32_t now = found(done);
      ++inside_;
      if (job_ == now) work();  // else the caller may have returned already
      --inside_;
      done = now;
    }
  }

  // Waits for a job other than `done`, and returns its number. Sleeps if there is no job for some time.
  uint32_t found(uint32_t done) {
    for (int i = 0;; ++i) {
      const uint32_t now = job_;
      if (now % 2 == 1 && now != done) return now;
      if (i < kLook) {
        pause(i);
        continue;
      }
      ++asleep_;
      syscall(SYS_futex, &job_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);  // returns at once if it changed
      --asleep_;
      i = 0;
    }
  }

  static const int kLook = 1 << 14;

  const int helpers_;
  std::mutex owner_;
  std::atomic<uint32_t> job_{0};
  std::atomic<int> inside_{0}, asleep_{0};
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  const void *body_ = nullptr;
  void (*run_)(const void *, int64_t) = nullptr;
};

// Cuts `total` into pieces of `size` (the last may be smaller); threads share the calls of body(first, size).
template <typename Body>
void parallel_pieces(int64_t total, int64_t size, Body body) {
  const int64_t count = (total + size - 1) / size;
  auto one = [&](int64_t i) { body(i * size, std::min(size, total - i * size)); };
  if (count == 1) return one(0);
  if (count > 1) ThreadTeam::get().share(count, one);
}

// Returns the size that cuts `total` into the fewest pieces of at most `most`, all of about the same size.
int64_t even_piece(int64_t total, int64_t most) {
  const int64_t count = std::max<int64_t>((total + most - 1) / most, 1);
  return std::max<int64_t>((total + count - 1) / count, 1);
}

int64_t count(const int64_t *shape, int dims) {
  int64_t total = 1;
  for (int i = 0; i < dims; ++i) total *= shape[i];
  return total;
}

}  // namespace
