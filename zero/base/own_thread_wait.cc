// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/own_thread_wait.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <utility>

#include "zero/base/slow_wait.h"
#include "zero/base/stat_fields.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

// A thread whose transfer has failed says so to the other ranks and closes connections first.
constexpr std::chrono::seconds kFailureSlack{5};

std::string first_line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Returns the number and name of a thread, its state, the function of the kernel in which it waits
// and the system call that it is in, and the processor time that it has used. What /proc does not
// say is left out.
std::string state_of(const fs::path& thread) {
  std::ostringstream text;
  text << "  thread " << thread.filename().string() << " (" << first_line_of(thread / "comm")
       << ")";
  const StatFields stat(thread / "stat");
  if (!stat.empty()) {
    const long ticks =
        std::stol(stat.at(StatFields::kUserTicks)) + std::stol(stat.at(StatFields::kSystemTicks));
    text << ": state " << stat.at(StatFields::kState) << ", " << ticks * 1000 / sysconf(_SC_CLK_TCK)
         << " ms of processor time";
  }
  const std::string waits_in = first_line_of(thread / "wchan");
  if (!waits_in.empty() && waits_in != "0") text << ", waits in " << waits_in;
  const std::string call = first_line_of(thread / "syscall");
  if (!call.empty()) text << ", system call " << call;
  return text.str();
}

// What the threads of this process do, for the report of a wait that should have ended.
std::string states() {
  std::string text = c10::str("The threads of process ", getpid(), ":\n");
  std::error_code error;
  for (fs::directory_iterator thread("/proc/self/task", error), end; !error && thread != end;
       thread.increment(error)) {
    text += state_of(thread->path()) + "\n";
  }
  return text;
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
