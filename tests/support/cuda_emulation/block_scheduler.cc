// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
#include "tests/support/cuda_emulation/block_scheduler.h"

#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "tests/support/cuda_emulation/cuda_emulation.h"

// Of the sanitizers' run time; null in a program without it. This file is compiled without
// -fsanitize=thread: the scheduler's own variables are not what is checked.
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber(void);
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** save, const void* bottom, size_t size);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* save, const void** bottom, size_t* size);
}

namespace cuda_emulation {
namespace {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;  // of a block
constexpr size_t kStack = 128 << 10;
constexpr unsigned kNoOrder = 1;  // a switch to a fiber that orders no memory

// A flow of execution that control is passed to and from.
struct Flow {
  ucontext_t context{};
  void* fiber = nullptr;         // ThreadSanitizer's
  void* fake_stack = nullptr;    // AddressSanitizer's
  const void* bottom = nullptr;  // of its stack
  size_t size = 0;
};

enum class State { kRunnable, kAtBarrier, kInWarp, kDone };

struct Thread : Flow {
  State state = State::kDone;
  const char* file = nullptr;  // of the barrier it waits at
  int line = 0;
  // What it gives to its warp in this exchange and in the one before.
  uint64_t values[2] = {};
  unsigned exchanges = 0;  // in this block
  unsigned barriers = 0;
  std::vector<char> stack;
};

void acquire(void* address) {
  if (__tsan_acquire != nullptr) __tsan_acquire(address);
}
void release(void* address) {
  if (__tsan_release != nullptr) __tsan_release(address);
}

// Passes control. Returns when it is passed back.
void pass(Flow& from, Flow& to) {
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.size);
  }
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(to.fiber, kNoOrder);
  swapcontext(&from.context, &to.context);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
  }
}

class Scheduler {
 public:
  void run_grid(unsigned grid, unsigned block, const std::function<void()>& body);
  void run_thread();
  void wait(State state);
  Thread& current() { return *threads_[static_cast<size_t>(current_)]; }

  unsigned current_ = 0;
  unsigned block_index_ = 0;
  unsigned block_size_ = 0;
  unsigned grid_size_ = 0;
  Order order_;
  Flow host_;
  std::vector<std::unique_ptr<Thread>> threads_;

 private:
  void make_threads(unsigned count);
  void run_block();
  bool run_warp(unsigned first);
  bool wake_block();
  std::vector<unsigned> order_of(unsigned count);

  std::mutex mutex_;
  std::mt19937 random_{1};
  const std::function<void()>* body_ = nullptr;
  // Their addresses carry what ThreadSanitizer knows of the order of memory.
  char begin_ = 0;
  char end_ = 0;
};

Order order_from_environment() {
  const char* given = std::getenv("ZERO_EMULATION_ORDER");
  if (given == nullptr || std::strcmp(given, "forward") == 0) return Order::kForward;
  if (std::strcmp(given, "backward") == 0) return Order::kBackward;
  if (std::strcmp(given, "shuffled") == 0) return Order::kShuffled;
  fail("ZERO_EMULATION_ORDER must be forward, backward or shuffled");
}

Scheduler& scheduler() {
  // Never destroyed: its threads stay in the middle of a function.
  static Scheduler* const one = [] {
    auto* made = new Scheduler;
    made->order_ = order_from_environment();
    return made;
  }();
  return *one;
}

void thread_main() {
  Scheduler& s = scheduler();
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &s.host_.bottom, &s.host_.size);
  }
  for (;;) {
    s.run_thread();
    s.wait(State::kDone);
  }
}

void Scheduler::make_threads(unsigned count) {
  while (threads_.size() < count) {
    auto thread = std::make_unique<Thread>();
    thread->stack.resize(kStack);
    thread->bottom = thread->stack.data();
    thread->size = kStack;
    if (__tsan_create_fiber != nullptr) thread->fiber = __tsan_create_fiber(0);
    getcontext(&thread->context);
    thread->context.uc_stack.ss_sp = thread->stack.data();
    thread->context.uc_stack.ss_size = kStack;
    thread->context.uc_link = nullptr;
    makecontext(&thread->context, thread_main, 0);
    threads_.push_back(std::move(thread));
  }
}

std::vector<unsigned> Scheduler::order_of(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0U);
  if (order_ == Order::kBackward) std::reverse(order.begin(), order.end());
  if (order_ == Order::kShuffled) std::shuffle(order.begin(), order.end(), random_);
  return order;
}

void Scheduler::run_grid(unsigned grid, unsigned block, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(mutex_);
  make_threads(block);
  if (__tsan_get_current_fiber != nullptr) host_.fiber = __tsan_get_current_fiber();
  body_ = &body;
  grid_size_ = grid;
  block_size_ = block;
  for (const unsigned index : order_of(grid)) {
    block_index_ = index;
    run_block();
  }
}

void Scheduler::run_block() {
  for (unsigned i = 0; i < block_size_; ++i) {
    threads_[i]->state = State::kRunnable;
    threads_[i]->exchanges = 0;
    threads_[i]->barriers = 0;
  }
  release(&begin_);
  bool all_done = false;
  while (!all_done) {
    bool moved = false;
    for (const unsigned warp : order_of((block_size_ + kWarp - 1) / kWarp)) {
      moved = run_warp(warp * kWarp) || moved;
    }
    moved = wake_block() || moved;
    all_done = std::all_of(threads_.begin(), threads_.begin() + block_size_,
                           [](const auto& thread) { return thread->state == State::kDone; });
    if (!moved && !all_done) fail("threads of a block wait for each other in different places");
  }
  acquire(&end_);
}

// Runs a warp until its threads end or wait for other warps, so that the warps that are last in the
// order are as far behind as barriers allow.
bool Scheduler::run_warp(unsigned first) {
  const unsigned count = std::min(kWarp, block_size_ - first);
  const auto begin = threads_.begin() + first;
  bool moved = false;
  for (bool again = true; again;) {
    for (const unsigned lane : order_of(count)) {
      if (begin[lane]->state != State::kRunnable) continue;
      moved = true;
      current_ = first + lane;
      pass(host_, *begin[lane]);
    }
    again = count == kWarp && std::all_of(begin, begin + count, [](const auto& thread) {
              return thread->state == State::kInWarp;
            });
    for (unsigned lane = 0; again && lane < count; ++lane) {
      begin[lane]->state = State::kRunnable;
    }
  }
  return moved;
}

bool Scheduler::wake_block() {
  const auto end = threads_.begin() + block_size_;
  const auto waits = [](const auto& thread) { return thread->state == State::kAtBarrier; };
  const auto ended = [](const auto& thread) { return thread->state == State::kDone; };
  const auto waiting = std::count_if(threads_.begin(), end, waits);
  if (waiting == 0) return false;
  if (waiting < block_size_) {
    if (waiting + std::count_if(threads_.begin(), end, ended) < block_size_) return false;
    fail("some threads of a block end without the __syncthreads() that others wait at");
  }
  const Thread& first = *threads_.front();
  for (auto thread = threads_.begin(); thread != end; ++thread) {
    if ((*thread)->line != first.line || std::strcmp((*thread)->file, first.file) != 0) {
      fail("the threads of a block wait at different calls of __syncthreads()");
    }
    (*thread)->state = State::kRunnable;
  }
  return true;
}

void Scheduler::run_thread() {
  acquire(&begin_);
  (*body_)();
  release(&end_);
}

void Scheduler::wait(State state) {
  Thread& thread = current();
  thread.state = state;
  pass(thread, host_);
}

}  // namespace

void fail(const char* sentence) {
  std::fprintf(stderr, "cuda_emulation: %s\n", sentence);
  std::abort();
}

void set_order(Order order) { scheduler().order_ = order; }

void run_grid(unsigned grid, unsigned block, const std::function<void()>& body) {
  scheduler().run_grid(grid, block, body);
}

unsigned thread_index() { return scheduler().current_; }
unsigned block_index() { return scheduler().block_index_; }
unsigned block_size() { return scheduler().block_size_; }
unsigned grid_size() { return scheduler().grid_size_; }

void wait_for_block(const char* file, int line) {
  // One for every other barrier: a thread that still has to acquire must not see what another has
  // released at the next barrier already.
  static char barriers[2] = {};
  Thread& thread = scheduler().current();
  char* barrier = &barriers[thread.barriers++ % 2];
  thread.file = file;
  thread.line = line;
  release(barrier);
  scheduler().wait(State::kAtBarrier);
  acquire(barrier);
}

void wait_for_warp() {
  static char barriers[kMostThreads / kWarp][2] = {};
  Scheduler& s = scheduler();
  char* barrier = &barriers[s.current_ / kWarp][s.current().exchanges++ % 2];
  release(barrier);
  s.wait(State::kInWarp);
  acquire(barrier);
}

void exchange_in_warp(unsigned mask, uint64_t value, uint64_t (&values)[32]) {
  if (mask != 0xffffffffU) fail("a warp function whose mask leaves out threads is not emulated");
  Scheduler& s = scheduler();
  const unsigned first = s.current_ / kWarp * kWarp;
  // A thread that is ahead cannot be two exchanges ahead, so two values each are enough.
  const unsigned turn = s.current().exchanges++ % 2;
  s.current().values[turn] = value;
  s.wait(State::kInWarp);
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    values[lane] = s.threads_[first + lane]->values[turn];
  }
}

}  // namespace cuda_emulation
