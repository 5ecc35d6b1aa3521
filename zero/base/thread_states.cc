// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/base/thread_states.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "zero/base/stat_fields.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

std::string first_line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

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

}  // namespace

std::string thread_states() {
  std::string text;
  std::error_code error;
  for (fs::directory_iterator thread("/proc/self/task", error), end; !error && thread != end;
       thread.increment(error)) {
    text += state_of(thread->path()) + "\n";
  }
  return text;
}

}  // namespace zero
