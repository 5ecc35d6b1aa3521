// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/rendezvous/usable_cores.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <string>

#include "tests/support/files.h"

namespace {

constexpr int kCores = 2000;

}  // namespace

// In place of the C library's, of a machine with more cores than a cpu_set_t has room for.
extern "C" int sched_getaffinity(pid_t, size_t size, cpu_set_t* cores) noexcept {
  if (size * 8 < kCores) {
    errno = EINVAL;
    return -1;
  }
  CPU_ZERO_S(size, cores);
  for (int core = 0; core < kCores; ++core) CPU_SET_S(core, size, cores);
  return 0;
}

namespace zero {
namespace {

namespace fs = std::filesystem;

class UsableCoresTest : public testing::Test {
 protected:
  ~UsableCoresTest() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    overwrite(root_ / path, text + "\n");
  }
  int cores() const { return usable_cores(root_.string()); }

 private:
  const fs::path root_ = fs::path(testing::TempDir()) / "usable_cores";
};

TEST_F(UsableCoresTest, WithoutAQuotaAllCoresOfALargeMachineCount) {
  EXPECT_EQ(cores(), kCores);
  write("proc/self/cgroup", "0::/");
  write("sys/fs/cgroup/cpu.max", "max 100000");
  EXPECT_EQ(cores(), kCores);
}

TEST_F(UsableCoresTest, TheLowestQuotaOfAGroupAndThoseAboveCounts) {
  write("proc/self/cgroup", "0::/a/b");
  write("sys/fs/cgroup/a/b/cpu.max", "max 100000");
  write("sys/fs/cgroup/a/cpu.max", "250000 100000");
  EXPECT_EQ(cores(), 2) << "half a core would be a thread that waits";
  write("sys/fs/cgroup/a/b/cpu.max", "50000 100000");
  EXPECT_EQ(cores(), 1);
  write("sys/fs/cgroup/a/b/cpu.max", "900000 100000");
  write("sys/fs/cgroup/a/cpu.max", "max 100000");
  EXPECT_EQ(cores(), 9);
}

// The path is that of outside: the container sees its own group at the top.
TEST_F(UsableCoresTest, AQuotaOfAContainerOfVersion1Counts) {
  write("proc/self/cgroup",
        "4:memory:/docker/x\n3:cpuset:/docker/x\n2:cpu,cpuacct:/docker/x\n0::/docker/x");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cores(), kCores);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000");
  EXPECT_EQ(cores(), 4);
}

}  // namespace
}  // namespace zero
