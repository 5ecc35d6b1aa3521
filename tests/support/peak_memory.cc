// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/peak_memory.h"

#include <malloc.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

namespace zero {
namespace {

double anonymous_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (word != "RssAnon:") continue;
    double kib = 0;
    status >> kib;
    return kib / 1024.0;
  }
  return 0;
}

}  // namespace

double peak_growth(const std::function<void()>& work) {
  // What was freed before goes back to the system, and what is freed from now on at
  // once: else the allocator would have it at hand, and nothing would seem to grow.
  mallopt(M_MMAP_THRESHOLD, 64 * 1024);
  malloc_trim(0);
  const double before = anonymous_mib();
  std::atomic<double> peak{before};
  // Ends when `work` throws, too.
  std::jthread sampler([&](const std::stop_token& done) {
    while (!done.stop_requested()) {
      const double now = anonymous_mib();
      if (now > peak) peak = now;
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  });
  work();
  sampler.request_stop();
  sampler.join();
  return peak - before;
}

}  // namespace zero
