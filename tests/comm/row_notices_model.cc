// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// A model of zero/comm/backends/row_notices.cc, whose memory orders x86 hides: two ranks, two
// slots, four rows, under all that the C++ memory model permits. Relacy (Debian's relacy-dev)
// executes it in many orders and finds data races, deadlocks and values that are not there yet.
// Each order is then weakened, which must be found. A program of its own, run by .ci/processors:
//
//   g++ -std=c++17 -fno-sized-deallocation -O2 -o model tests/comm/row_notices_model.cc && ./model
#include <cstdio>
#include <fstream>

#include <relacy/relacy.hpp>  // last: it redefines `delete`

namespace {

constexpr unsigned kSlots = 2;
constexpr unsigned kRows = 4;

// What is weaker than in the library.
enum Weak {
  kNothing,
  kAnnounced,      // the store of `announced`
  kAnnouncedLoad,  // and its load
  kNumber,         // the store of a row's number once it is taken
  kNumberLoad,     // and its load
  kTaken,          // the count of what is taken
  kTakenLoad,      // and its load
  kOrder,          // `taken` is counted before the number is there
  kSeenLater,      // a count is read after the condition that it stands for
  kWeaknesses,
};
Weak weak = kNothing;

rl::memory_order unless(Weak weakness, rl::memory_order order) {
  return weak == weakness ? rl::mo_relaxed : order;
}

// The system compares the word and begins to wait in one step, and a wake-up is behind a store.
class Futex {
 public:
  void wait(const rl::atomic<unsigned>& word, unsigned seen) {
    mutex_.lock($);
    while (word.load(rl::mo_relaxed, $) == seen) changed_.wait(mutex_, $);
    mutex_.unlock($);
  }
  void wake() {
    mutex_.lock($);
    changed_.notify_all($);
    mutex_.unlock($);
  }

 private:
  rl::mutex mutex_;
  rl::condition_variable_any changed_;
};

struct Notices : rl::test_suite<Notices, 2> {
  rl::atomic<unsigned> announced, taken, numbers[kSlots];
  rl::var<unsigned> slots[kSlots];  // what an announcement says
  rl::var<unsigned> rows[kSlots];   // the row itself, whose memory is used again once it is taken
  Futex of_announced, of_taken;

  void before() {
    announced.store(0, rl::mo_relaxed, $);
    taken.store(0, rl::mo_relaxed, $);
    for (auto& number : numbers) number.store(0, rl::mo_relaxed, $);
  }

  void thread(unsigned index) { index == 0 ? announce() : take(); }

  void announce() {
    for (unsigned n = 0; n < kRows; ++n) {
      if (n >= kSlots) wait_until_taken(n - kSlots);
      rows[n % kSlots]($) = 100 + n;
      slots[n % kSlots]($) = n;
      announced.store(n + 1, unless(kAnnounced, rl::mo_release), $);
      of_announced.wake();
    }
    wait_until_taken(kRows - 1);
  }

  void wait_until_taken(unsigned row) {
    while (true) {
      unsigned seen = weak == kSeenLater ? 0 : taken.load(unless(kTakenLoad, rl::mo_acquire), $);
      if (numbers[row % kSlots].load(unless(kNumberLoad, rl::mo_acquire), $) > row) return;
      if (weak == kSeenLater) seen = taken.load(rl::mo_acquire, $);
      of_taken.wait(taken, seen);
    }
  }

  void take() {
    for (unsigned read = 0; read < kRows;) {
      const unsigned seen = announced.load(unless(kAnnouncedLoad, rl::mo_acquire), $);
      if (seen == read) of_announced.wait(announced, seen);
      for (; read < seen; ++read) {
        RL_ASSERT(slots[read % kSlots]($) == read);
        RL_ASSERT(rows[read % kSlots]($) == 100 + read);
        if (weak == kOrder) taken.fetch_add(1, rl::mo_release, $);
        if (weak == kOrder) of_taken.wake();
        numbers[read % kSlots].store(read + 1, unless(kNumber, rl::mo_release), $);
        if (weak != kOrder) taken.fetch_add(1, unless(kTaken, rl::mo_release), $);
        if (weak != kOrder) of_taken.wake();
      }
    }
  }
};

// Prints the execution that is wrong, where none is expected.
bool holds(rl::scheduler_type_e search, unsigned executions) {
  std::ofstream nowhere("/dev/null");
  rl::test_params params;
  params.search_type = search;
  params.iteration_count = executions;
  params.context_bound = 3;
  if (weak != kNothing) params.output_stream = &nowhere;
  params.progress_stream = &nowhere;
  return rl::simulate<Notices>(params);
}

}  // namespace

int main() {
  int failed = 0;
  for (int weakness = kNothing; weakness < kWeaknesses; ++weakness) {
    weak = static_cast<Weak>(weakness);
    const bool held =
        holds(rl::random_scheduler_type, 200000) && holds(rl::fair_context_bound_scheduler_type, 0);
    const bool expected = weak == kNothing;
    std::printf("%s: %s\n", expected ? "as written" : "weakened",
                held ? "holds in all executions" : "an execution is wrong");
    if (held != expected) ++failed;
  }
  std::printf("%d failed\n", failed);
  return failed == 0 ? 0 : 1;
}
