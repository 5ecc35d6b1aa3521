// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/own_thread_wait.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "zero/base/slow_wait.h"
#include "zero/base/thread_states.h"

namespace zero {
namespace {

// A thread whose transfer has failed says so to the other ranks and closes connections first.
constexpr std::chrono::seconds kFailureSlack{5};

std::string states() {
  return c10::str("The threads of process ", getpid(), ":\n", thread_states());
}

}  // namespace

OwnThreadWait::OwnThreadWait(std::string text, std::chrono::milliseconds limit, std::string reason)
    : text_(std::move(text)), limit_(limit), reason_(std::move(reason)) {}

void OwnThreadWait::look(int64_t progress) {
  if (std::exchange(progress_, progress) != progress) looks_ = 0;
  ++looks_;
  if (!printed_ && looks_ * kLook >= 2 * slow_wait_after()) {
    printed_ = true;
    print_slow_wait(c10::str(text_, " (up to ", duration_text(limit_), ")"));
  }
  if (looks_ * kLook <= limit_ + kFailureSlack) return;
  print_slow_wait(c10::str(text_, ", which has done nothing for ", looks_, " s. ", states()));
  TORCH_CHECK(reason_.empty(), text_, ", which has done nothing for ", looks_, " s: ", reason_);
  TORCH_CHECK(false, text_, ", which has done nothing for ", looks_,
              " s though no transfer takes longer than ", duration_text(limit_),
              ": this is a fault of the library or of its transport; please report it with the "
              "states of the threads, which are on stderr, and if you can with the output of "
              "`gdb -p <process> -batch -ex 'thread apply all bt'`");
}

void join_own_thread(std::thread& thread, const std::string& what) {
  const std::string text = c10::str("process ", getpid(), " waits for ", what, " to end");
  const auto begin = std::chrono::steady_clock::now();
  const auto printed = std::make_shared<bool>(false);
  const auto look = [=] {
    if (*printed || std::chrono::steady_clock::now() - begin < 6 * slow_wait_after()) return;
    *printed = true;
    print_slow_wait(c10::str(text, ", for long. ", states()));
  };
  const SlowWait wait([=] { return text; }, look);
  thread.join();
}

}  // namespace zero
