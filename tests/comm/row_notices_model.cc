// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Runs zero/comm/backends/notice_page.h, whose memory orders x86 hides: two ranks, two slots, four
// rows, under all that the C++ memory model permits. Relacy (Debian's relacy-dev) executes it in
// many orders and finds data races, deadlocks and values that are not there yet. Each order is then
// weakened, which must be found. A program of its own, run by .ci/processors:
//
//   g++ -std=c++20 -fno-sized-deallocation -O2 -I. tests/comm/row_notices_model.cc && ./a.out
#include <cstdio>
#include <fstream>

#include "zero/comm/backends/notice_page.h"

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

rl::memory_order unless(Weak weakness, std::memory_order order) {
  if (weak == weakness) return rl::mo_relaxed;
  return order == std::memory_order::acquire   ? rl::mo_acquire
         : order == std::memory_order::release ? rl::mo_release
                                               : rl::mo_relaxed;
}

template <typename T>
struct Word {
  rl::atomic<T> value;
  Weak at_write = kNothing, at_load = kNothing;
  T load(std::memory_order order) const { return value.load(unless(at_load, order), $); }
  void store(T desired, std::memory_order order) {
    value.store(desired, unless(at_write, order), $);
  }
  void add(T more, std::memory_order order) { value.fetch_add(more, unless(at_write, order), $); }
};

struct Slot {
  rl::var<uint64_t> row;  // what an announcement says
  void operator=(uint64_t said) { row($) = said; }
};

// The system compares the word and begins to wait in one step, and a wake-up is behind a store.
class Futex {
 public:
  void wait(const Word<uint32_t>& word, uint32_t seen) {
    mutex_.lock($);
    while (word.value.load(rl::mo_relaxed, $) == seen) changed_.wait(mutex_, $);
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
  // Of both ranks: one announces, the other takes.
  zero::NoticePage<Word, Slot, kSlots> page;
  rl::var<unsigned> rows[kSlots];  // the row itself, whose memory is used again once it is taken
  Futex of_announced, of_taken;

  void before() {
    const auto begin = [](auto& word, Weak at_write, Weak at_load) {
      word.value.store(0, rl::mo_relaxed, $);
      word.at_write = at_write;
      word.at_load = at_load;
    };
    begin(page.announced, kAnnounced, kAnnouncedLoad);
    begin(page.taken, kTaken, kTakenLoad);
    for (auto& number : page.numbers) begin(number, kNumber, kNumberLoad);
  }

  void thread(unsigned index) { index == 0 ? announce() : take(); }

  void announce() {
    for (unsigned n = 0; n < kRows; ++n) {
      if (n >= kSlots) wait_until_taken(n - kSlots);
      rows[n % kSlots]($) = 100 + n;
      page.announce(n, n);
      of_announced.wake();
    }
    wait_until_taken(kRows - 1);
  }

  void wait_until_taken(unsigned row) {
    while (true) {
      uint32_t seen = weak == kSeenLater ? 0 : page.count_taken();
      if (page.is_taken(row)) return;
      if (weak == kSeenLater) seen = page.count_taken();
      of_taken.wait(page.taken, seen);
    }
  }

  void take() {
    for (unsigned read = 0; read < kRows;) {
      const uint32_t seen = page.count_announced();
      if (seen == read) of_announced.wait(page.announced, seen);
      for (; read < seen; ++read) {
        RL_ASSERT(page.slots[read % kSlots].row($) == read);
        RL_ASSERT(rows[read % kSlots]($) == 100 + read);
        if (weak == kOrder) {
          page.taken.value.fetch_add(1, rl::mo_release, $);
          of_taken.wake();
          page.numbers[read % kSlots].value.store(read + 1, rl::mo_release, $);
        } else {
          page.take(read);
          of_taken.wake();
        }
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
