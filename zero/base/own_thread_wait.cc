// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/own_thread_wait.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <utility>

#include "zero/base/slow_wait.h"
#include "zero/base/thread_states.h"

namespace zero {
namespace {

// A thread whose transfer has failed says so to the other ranks and closes connections first.
constexpr std::chrono::seconds kFailureSlack{5};

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
  print_slow_wait(c10::str(text_, ", which has done nothing for ", looks_, " s. The threads of ",
                           "process ", getpid(), ":\n", thread_states()));
  TORCH_CHECK(reason_.empty(), text_, ", which has done nothing for ", looks_, " s: ", reason_);
  TORCH_CHECK(false, text_, ", which has done nothing for ", looks_,
              " s though no transfer takes longer than ", duration_text(limit_),
              ": this is a fault of the library or of its transport; please report it with the "
              "states of the threads, which are on stderr, and if you can with the output of "
              "`gdb -p <process> -batch -ex 'thread apply all bt'`");
}

}  // namespace zero
