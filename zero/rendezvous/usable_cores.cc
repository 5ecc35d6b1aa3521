// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/rendezvous/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <vector>

namespace zero {
namespace {

constexpr int kNoLimit = std::numeric_limits<int>::max();
// In sets of 1024 cores, more than any kernel has room for.
constexpr size_t kMostSets = 64;

// The kernel fills no set that is smaller than its own.
int cores_of_affinity() {
  for (size_t sets = 1; sets <= kMostSets; sets *= 2) {
    std::vector<cpu_set_t> cores(sets);
    const size_t bytes = sets * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, cores.data()) == 0) return CPU_COUNT_S(bytes, cores.data());
    if (errno != EINVAL) break;
  }
  return 1;
}

// Empty if there is no such file.
std::string read_file(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// `quota` is a time and a period; "max" or -1 in place of a time is none.
int cores_of_quota(const std::string& quota) {
  std::istringstream text(quota);
  int64_t time = 0, period = 0;
  if (!(text >> time >> period) || time <= 0 || period <= 0) return kNoLimit;
  return static_cast<int>(std::clamp<int64_t>(time / period, 1, kNoLimit));
}

// Lines "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1.
int cores_of_groups(const std::string& root) {
  int cores = kNoLimit;
  std::istringstream lines(read_file(root + "/proc/self/cgroup"));
  std::string number, controllers, path;
  while (std::getline(lines, number, ':') && std::getline(lines, controllers, ':') &&
         std::getline(lines, path)) {
    const bool version2 = controllers.empty();
    if (!version2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    const std::string top = root + "/sys/fs/cgroup" + (version2 ? "" : "/cpu");
    // Each group above counts too. In a container the path may be that of outside, where the files
    // of the group are at the top.
    for (size_t end = path.size(); end != std::string::npos; end = path.rfind('/')) {
      path.resize(end);
      const std::string folder = top + path;
      cores =
          std::min(cores, cores_of_quota(version2 ? read_file(folder + "/cpu.max")
                                                  : read_file(folder + "/cpu.cfs_quota_us") +
                                                        read_file(folder + "/cpu.cfs_period_us")));
    }
  }
  return cores;
}

}  // namespace

int usable_cores(const std::string& root) {
  return std::min(cores_of_affinity(), cores_of_groups(root));
}

}  // namespace zero
