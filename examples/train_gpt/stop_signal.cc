// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "examples/train_gpt/stop_signal.h"

#include <unistd.h>

#include <csignal>
#include <ctime>
#include <thread>

namespace zero::examples {
namespace {

volatile std::sig_atomic_t requested = 0;
volatile std::time_t first_interrupt = 0;

// Calls only what a signal handler may call.
void request(int signal) {
  requested = 1;
  if (signal != SIGINT) return;
  const std::time_t now = time(nullptr);
  if (first_interrupt == 0) {
    first_interrupt = now;
  } else if (now > first_interrupt + 1) {
    std::signal(SIGINT, SIG_DFL);
    raise(SIGINT);
  }
}

}  // namespace

void watch_stop_signal() {
  std::signal(SIGTERM, request);
  std::signal(SIGINT, request);
}

bool stop_requested() { return requested != 0; }

bool stop_requested_within(std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!stop_requested() && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return stop_requested();
}

}  // namespace zero::examples
