// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <string>
#include <system_error>

namespace zero {

// Lets this thread, and those it starts, make mounts that only they see. Returns whether the kernel
// permits it.
inline bool own_mounts() {
  // Read before the call, behind which both are unknown until they have a map.
  const std::string user = "0 " + std::to_string(geteuid()) + " 1";
  const std::string group = "0 " + std::to_string(getegid()) + " 1";
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << user;
    // Without it a file system that is mounted here answers EOVERFLOW to every new file.
    std::ofstream("/proc/self/gid_map") << group;
  }
  return mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

// Makes a file in `folder` and removes it. Returns why it cannot, or "".
inline std::string why_no_file(const std::string& folder) {
  const std::string path = folder + "/own-mounts-test";
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  if (file < 0) return "no new file in " + folder + ": " + std::generic_category().message(errno);
  close(file);
  unlink(path.c_str());
  return "";
}

// Mounts a file system in memory at `path` for this thread and those it starts. Returns why it
// cannot, or "".
inline std::string why_not_mounted(const std::string& path, const std::string& options = "") {
  static const bool own = own_mounts();
  if (!own) return "no mount namespace of its own";
  if (mount("memory", path.c_str(), "tmpfs", 0, options.c_str()) != 0) {
    return "cannot mount tmpfs: " + std::generic_category().message(errno);
  }
  const std::string problem = why_no_file(path);
  if (!problem.empty()) umount2(path.c_str(), MNT_DETACH);
  return problem;
}

}  // namespace zero
