// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/base/descriptors.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <system_error>

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr char kDirectory[] = "/proc/self/fd";

// Beside those of a communicator, for what a program opens meanwhile. Gloo ends the process when
// it cannot accept a connection.
constexpr int kSpare = 16;

// In ascending order; empty where they cannot be read.
std::vector<int> open_descriptors() {
  std::vector<int> result;
  std::error_code error;
  for (fs::directory_iterator entry(kDirectory, error), end; !error && entry != end;
       entry.increment(error)) {
    result.push_back(std::atoi(entry->path().filename().c_str()));
  }
  // One of them was that of the directory, whose number the next owner gets.
  std::erase_if(result, [](int descriptor) { return fcntl(descriptor, F_GETFD) < 0; });
  std::sort(result.begin(), result.end());
  return result;
}

// "socket:[8071]", "pipe:[8072]", "anon_inode:[eventpoll]" or a path; empty when it is closed.
std::string target_of(int descriptor) {
  std::error_code closed;
  return fs::read_symlink(fs::path(kDirectory) / std::to_string(descriptor), closed).string();
}

bool is_pipe(const std::string& target) { return target.rfind("pipe:", 0) == 0; }

std::map<int, std::string> open_targets() {
  std::map<int, std::string> result;
  for (const int descriptor : open_descriptors()) result[descriptor] = target_of(descriptor);
  return result;
}

// Returns the descriptors that are open now and were not then, with their targets. Another thread
// may have closed one of then, whose number has another target now.
std::map<int, std::string> opened_since(const std::map<int, std::string>& before) {
  std::map<int, std::string> result = open_targets();
  std::erase_if(result, [&](const auto& now) {
    const auto then = before.find(now.first);
    return then != before.end() && then->second == now.second;
  });
  return result;
}

bool is_epoll(const std::string& target) { return target == "anon_inode:[eventpoll]"; }

void close_on_exec(int descriptor) {
  const int flags = fcntl(descriptor, F_GETFD);
  if (flags >= 0 && (flags & FD_CLOEXEC) == 0) fcntl(descriptor, F_SETFD, flags | FD_CLOEXEC);
}

}  // namespace

std::string make_room_for_descriptors(int needed) {
  const size_t in_use = open_descriptors().size();
  const rlim_t wanted = in_use + static_cast<rlim_t>(needed) + kSpare;
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || wanted <= limit.rlim_cur) return {};
  if (wanted <= limit.rlim_max) {
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) == 0) return {};
  }
  return c10::str("too few file descriptors: expected a limit of at least ", wanted, " (", in_use,
                  " are open, ", needed, " are needed and ", kSpare, " are to spare), got ",
                  limit.rlim_max, "; raise it with `ulimit -n ", wanted,
                  "` or where your system keeps the hard limit, `ulimit -Hn`");
}

void survive_broken_pipes() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action = {};
    if (sigaction(SIGPIPE, nullptr, &action) == 0 && (action.sa_flags & SA_SIGINFO) == 0 &&
        action.sa_handler == SIG_DFL) {
      std::signal(SIGPIPE, SIG_IGN);
    }
  });
}

// Lines "tfd:       12 events: ...".
std::vector<int> watched_by(int epoll) {
  std::vector<int> result;
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll));
  for (std::string line; std::getline(info, line);) {
    int descriptor = -1;
    if (std::sscanf(line.c_str(), "tfd: %d", &descriptor) == 1) result.push_back(descriptor);
  }
  return result;
}

NewDescriptors::NewDescriptors() : before_(open_targets()) {}

std::vector<int> NewDescriptors::epolls() const {
  std::vector<int> result;
  for (const auto& [descriptor, target] : opened_since(before_)) {
    if (is_epoll(target)) result.push_back(descriptor);
  }
  return result;
}

std::vector<int> NewDescriptors::watched() const {
  std::vector<int> result;
  for (const int epoll : epolls()) {
    const std::vector<int> found = watched_by(epoll);
    result.insert(result.end(), found.begin(), found.end());
  }
  return result;
}

void NewDescriptors::close_watched_on_exec() const {
  std::set<std::string> pipes;
  for (const int descriptor : watched()) {
    close_on_exec(descriptor);
    if (const std::string text = target_of(descriptor); is_pipe(text)) pipes.insert(text);
  }
  for (const auto& [descriptor, target] : opened_since(before_)) {
    if (is_epoll(target) || pipes.count(target) > 0) close_on_exec(descriptor);
  }
}

void NewDescriptors::close_pipes_on_exec() const {
  const std::map<int, std::string> opened = opened_since(before_);
  std::map<std::string, int> ends;
  for (const auto& [descriptor, target] : opened) ++ends[target];
  for (const auto& [descriptor, target] : opened) {
    if (is_pipe(target) && ends[target] > 1) close_on_exec(descriptor);
  }
}

}  // namespace zero
