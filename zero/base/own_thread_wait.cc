// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/own_thread_wait.h"

#include <c10/util/Exception.h>

#include <utility>

#include "zero/base/slow_wait.h"

namespace zero {
namespace {

// A thread whose transfer has failed says so to the other ranks and closes connections first.
constexpr std::chrono::seconds kGrace{5};

}  // namespace

OwnThreadWait::OwnThreadWait(std::string text, std::chrono::milliseconds limit)
    : text_(std::move(text)), limit_(limit) {}

void OwnThreadWait::look(int64_t progress) {
  if (std::exchange(progress_, progress) != progress) looks_ = 0;
  ++looks_;
  if (!printed_ && looks_ * kLook >= 2 * slow_wait_after()) {
    printed_ = true;
    print_slow_wait(c10::str(text_, " (up to ", duration_text(limit_), ")"));
  }
  TORCH_CHECK(looks_ * kLook <= limit_ + kGrace, text_, ", which has done nothing for ", looks_,
              " s though no transfer takes longer than ", duration_text(limit_),
              ": this is a fault of the library or of its transport; please report it with the "
              "output of `gdb -p <process> -batch -ex 'thread apply all bt'`");
}

}  // namespace zero
