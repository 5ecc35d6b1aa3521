// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fuzz_seeds.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>

namespace zero {
namespace {

std::atomic<const std::string*> current{nullptr};

constexpr std::array<int, 5> kSignals = {SIGABRT, SIGSEGV, SIGBUS, SIGALRM, SIGTERM};
std::array<struct sigaction, NSIG> before;  // a sanitizer's, for example

// Uses nothing but what a signal handler may.
void print_current(int signal) {
  const std::string* const text = current.load();
  if (text != nullptr) {
    constexpr char kHead[] = "\naborted or stuck in\n";
    (void)!write(STDERR_FILENO, kHead, sizeof(kHead) - 1);
    (void)!write(STDERR_FILENO, text->data(), text->size());
  }
  for (const int s : kSignals) sigaction(s, &before[s], nullptr);
  raise(signal == SIGALRM ? SIGABRT : signal);
}

uint64_t number_or(const char* variable, uint64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

}  // namespace

Seeds chosen_seeds(Seeds otherwise) {
  if (std::getenv("ZERO_FUZZ_SEED") != nullptr) return {number_or("ZERO_FUZZ_SEED", 1), 1};
  return {number_or("ZERO_FUZZ_FIRST", otherwise.first),
          number_or("ZERO_FUZZ_COUNT", otherwise.count)};
}

void print_if_aborted(const std::string* text, std::chrono::seconds limit) {
  static const bool installed = [] {
    struct sigaction action {};
    action.sa_handler = print_current;
    for (const int s : kSignals) sigaction(s, &action, &before[s]);
    return true;
  }();
  (void)installed;
  current = text;
  alarm(text == nullptr ? 0 : static_cast<unsigned>(limit.count()));
}

}  // namespace zero
