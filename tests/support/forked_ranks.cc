// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/support/forked_ranks.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/end_at_once.h"

namespace zero {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kForks = false;
#else
constexpr bool kForks = true;
#endif

int (*program_of_ranks)(int, char**) = nullptr;  // of a program that has forked ranks

}  // namespace

void close_as_exec_does() {
  std::vector<int> open;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    open.push_back(std::stoi(entry.path().filename().string()));
  }
  for (const int descriptor : open) {
    if (fcntl(descriptor, F_GETFD) == FD_CLOEXEC) close(descriptor);
  }
}

void run_with_forked_ranks(int (*program)(int, char**), int argc, char** argv) {
  if (kForks) program_of_ranks = program;
  end_at_once(program(argc, argv));
}

}  // namespace zero

// In place of the C library's, for the call of launch_local() in the forked process.
extern "C" int execve(const char* path, char* const* arguments, char* const* variables) noexcept {
  if (zero::program_of_ranks == nullptr || std::string_view(path) != "/proc/self/exe") {
    return static_cast<int>(syscall(SYS_execve, path, arguments, variables));
  }
  zero::close_as_exec_does();
  environ = const_cast<char**>(variables);
  int count = 0;
  while (arguments[count] != nullptr) ++count;
  zero::end_at_once(zero::program_of_ranks(count, const_cast<char**>(arguments)));
}
