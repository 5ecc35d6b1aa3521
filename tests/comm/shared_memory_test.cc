// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Memory that another process reads in place. tests/comm/row_exchange_test.cc has the rows that
// pass through it.

#include "zero/comm/backends/shared_memory.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sum.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"

namespace {

bool holes_are_refused = false;
bool pages_are_refused = false;

}  // namespace

// In place of the C library's.
extern "C" int fallocate(int descriptor, int mode, off_t offset, off_t length) {
  if (holes_are_refused) {
    errno = EOPNOTSUPP;
    return -1;
  }
  if (pages_are_refused && (mode & FALLOC_FL_PUNCH_HOLE) == 0) {
    errno = ENOSPC;
    return -1;
  }
  return static_cast<int>(syscall(SYS_fallocate, descriptor, mode, offset, length));
}

namespace zero {
namespace {

const int64_t kPage = sysconf(_SC_PAGESIZE);

// What `body` returns in a forked process.
bool in_another_process(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

int64_t resident_shared_kib() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("RssShmem:", 0) == 0) return std::stoll(line.substr(9));
  }
  return -1;
}

TEST(SharedMemory, WhatCannotBeMadeZerosIsNotUsedAgain) {
  const auto memory = SharedMemory::instance();
  ASSERT_TRUE(memory);
  at::Tensor first = memory->allocate(kPage);
  const int64_t offset = *memory->offset_of(first);
  first.fill_(7);
  holes_are_refused = true;
  first = at::Tensor();
  holes_are_refused = false;
  const at::Tensor second = memory->allocate(kPage);
  EXPECT_NE(*memory->offset_of(second), offset);
  EXPECT_EQ(second.sum().item<int64_t>(), 0);
}

TEST(SharedMemory, AnotherProcessSeesWhatIsWrittenLater) {
  const auto memory = SharedMemory::instance();
  ASSERT_TRUE(memory);
  at::Tensor block = memory->allocate(4000);
  ASSERT_EQ(memory->offset_of(block), *memory->offset_of(block));
  at::Tensor longs = block.view(at::kLong);
  const SharedMemoryAddress address = memory->address();
  const int64_t offset = *memory->offset_of(longs);
  int to_child[2];
  int to_parent[2];
  ASSERT_EQ(pipe(to_child) + pipe(to_parent), 0);
  const pid_t child = fork();
  if (child == 0) {
    const auto peer = PeerMemory::open(address);
    char byte = 0;
    bool good =
        peer != nullptr && write(to_parent[1], &byte, 1) == 1 && read(to_child[0], &byte, 1) == 1;
    if (good) {
      int64_t seen = 0;
      std::memcpy(&seen, peer->at(offset + 499 * 8, 8), 8);
      good = seen == 499;
    }
    _exit(good ? 0 : 1);
  }
  char byte = 0;
  ASSERT_EQ(read(to_parent[0], &byte, 1), 1);
  longs.copy_(at::arange(500, at::kLong));
  ASSERT_EQ(write(to_child[1], &byte, 1), 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(SharedMemory, OnlyTheRightFileIsOpened) {
  const auto memory = SharedMemory::instance();
  ASSERT_TRUE(memory);
  const SharedMemoryAddress right = memory->address();
  EXPECT_TRUE(PeerMemory::open(right));
  std::vector<SharedMemoryAddress> wrong(6, right);
  wrong[0].machine[3] = 'x';
  wrong[1].process = 1;
  wrong[2].descriptor = 1;  // some file, and not to be opened
  wrong[3].descriptor = -1;
  wrong[4].bytes += kPage;
  wrong[5].password[1] += 1;
  for (size_t i = 0; i < wrong.size(); ++i) EXPECT_FALSE(PeerMemory::open(wrong[i])) << i;
}

// A copy of this process's address that leads to another file with the same contents.
struct OtherFile {
  explicit OtherFile(unsigned flags, int seals = 0) : file(memfd_create("zero", flags)) {
    address = SharedMemory::instance()->address();
    address.descriptor = file;
    address.bytes = 2 * kPage;
    EXPECT_EQ(ftruncate(file, address.bytes), 0);
    EXPECT_EQ(pwrite(file, address.password.data(), sizeof(address.password), 0),
              ssize_t{sizeof(address.password)});
    EXPECT_EQ(seals == 0 ? 0 : fcntl(file, F_ADD_SEALS, seals), 0);
  }
  ~OtherFile() { close(file); }
  SharedMemoryAddress address;
  int file;
};

TEST(SharedMemory, NoFileStaysOpenForAMapping) {
  const SharedMemoryAddress address = SharedMemory::instance()->address();
  const auto lowest_free = [] {
    const int descriptor = dup(STDIN_FILENO);
    close(descriptor);
    return descriptor;
  };
  const int before = lowest_free();
  const auto peer = PeerMemory::open(address);
  EXPECT_TRUE(peer);
  EXPECT_FALSE(PeerMemory::open(OtherFile(0).address));
  EXPECT_EQ(lowest_free(), before);
}

TEST(SharedMemory, NoProcessCanCutItOff) {
  const SharedMemoryAddress address = SharedMemory::instance()->address();
  const auto file = static_cast<int>(address.descriptor);
  for (const int64_t bytes : {int64_t{0}, address.bytes - kPage, address.bytes + kPage}) {
    EXPECT_EQ(ftruncate(file, bytes), -1);
    EXPECT_EQ(errno, EPERM);
  }
  EXPECT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_WRITE), -1) << "blocks could not be freed any more";
  EXPECT_TRUE(PeerMemory::open(address));
}

TEST(SharedMemory, AFileThatCanBeCutOffIsNotOpened) {
  constexpr int kAll = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  EXPECT_TRUE(PeerMemory::open(OtherFile(MFD_ALLOW_SEALING, kAll).address));
  EXPECT_FALSE(PeerMemory::open(OtherFile(0).address));
  EXPECT_FALSE(PeerMemory::open(OtherFile(MFD_ALLOW_SEALING).address));
  for (const int seal : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
    EXPECT_FALSE(PeerMemory::open(OtherFile(MFD_ALLOW_SEALING, kAll & ~seal).address)) << seal;
  }
}

int mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) {
    count += line.find("/memfd:zero") != std::string::npos;
  }
  return count;
}

TEST(SharedMemory, APeerIsMappedOnceAndAsLongAsItIsRead) {
  const SharedMemoryAddress address = SharedMemory::instance()->address();
  const int before = mappings();
  auto first = PeerMemory::open(address);
  auto second = PeerMemory::open(address);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(mappings(), before + 1);
  EXPECT_EQ(first->at(kPage, 1), second->at(kPage, 1));
  // What has another size or place is not the same.
  SharedMemoryAddress wrong = address;
  wrong.bytes += kPage;
  EXPECT_FALSE(PeerMemory::open(wrong));
  first.reset();
  EXPECT_EQ(std::memcmp(second->at(0, 16), address.password.data(), 16), 0);
  second.reset();
  EXPECT_EQ(mappings(), before);
  EXPECT_TRUE(PeerMemory::open(address));
}

TEST(SharedMemory, NothingOutsideTheFileIsRead) {
  const auto memory = SharedMemory::instance();
  const auto peer = PeerMemory::open(memory->address());
  ASSERT_TRUE(peer);
  const int64_t bytes = memory->address().bytes;
  EXPECT_NE(peer->at(bytes - 8, 8), nullptr);
  for (const auto& [offset, length] : {std::pair{bytes - 8, int64_t{9}},
                                       {int64_t{-1}, int64_t{8}},
                                       {int64_t{1} << 62, int64_t{8}},
                                       {int64_t{0}, int64_t{-1}},
                                       {bytes, int64_t{1}}}) {
    EXPECT_NE(error_of([&, o = offset, l = length] { peer->at(o, l); }), "");
  }
}

TEST(SharedMemory, BlocksAreApartAndUsedAgainAsZeros) {
  const auto memory = SharedMemory::instance();
  const auto offset = [&](const at::Tensor& block) { return *memory->offset_of(block); };
  at::Tensor a = memory->allocate(1);
  at::Tensor b = memory->allocate(kPage + 1);
  at::Tensor c = memory->allocate(kPage);
  EXPECT_EQ(offset(b) - offset(a), kPage);
  EXPECT_EQ(offset(c) - offset(b), 2 * kPage);
  EXPECT_EQ(offset(b.narrow(0, 100, 10)) - offset(b), 100);
  EXPECT_FALSE(memory->offset_of(at::empty({10})).has_value());
  const int64_t first = offset(a);
  b.fill_(7);
  a.fill_(7);
  // In both orders, so that a hole grows at its end and at its beginning.
  b = at::Tensor();
  a = at::Tensor();
  at::Tensor both = memory->allocate(3 * kPage);
  EXPECT_EQ(offset(both), first);
  EXPECT_EQ(both.max().item<uint8_t>(), 0);
  both.fill_(7);
  both = at::Tensor();
  c = at::Tensor();
  at::Tensor all = memory->allocate(4 * kPage);
  EXPECT_EQ(offset(all), first);
  EXPECT_EQ(all.max().item<uint8_t>(), 0);
}

TEST(SharedMemory, FreedMemoryGoesBackToTheSystemForEverybody) {
  const auto memory = SharedMemory::instance();
  const auto peer = PeerMemory::open(memory->address());
  ASSERT_TRUE(peer);
  const int64_t before = resident_shared_kib();
  constexpr int64_t kBytes = 64 << 20;
  at::Tensor block = memory->allocate(kBytes);
  block.fill_(1);
  std::string copy(kBytes, '\0');
  std::memcpy(copy.data(), peer->at(*memory->offset_of(block), kBytes), kBytes);
  EXPECT_EQ(copy.back(), 1);
  EXPECT_GT(resident_shared_kib() - before, 120 << 10);  // in both mappings
  block = at::Tensor();
  EXPECT_LT(resident_shared_kib() - before, 1 << 10);
}

// A process that shares memory full of sevens, and is killed at the end.
class OtherProcess {
 public:
  explicit OtherProcess(int64_t bytes) {
    int to_parent[2];
    EXPECT_EQ(pipe(to_parent), 0);
    const SharedMemoryAddress ours = SharedMemory::instance()->address();
    process_ = fork();
    if (process_ == 0) {
      const SharedMemoryAddress address = share(ours, bytes);
      const bool sent = write(to_parent[1], &address, sizeof(address)) == ssize_t{sizeof(address)};
      while (sent) pause();
      _exit(1);
    }
    EXPECT_EQ(read(to_parent[0], &address_, sizeof(address_)), ssize_t{sizeof(address_)});
    close(to_parent[0]);
    close(to_parent[1]);
  }
  ~OtherProcess() {
    kill_it();
    waitpid(process_, nullptr, 0);
  }
  const SharedMemoryAddress& address() const { return address_; }
  // Returns when it has ended; its parent does not take note of it.
  void kill_it() {
    kill(process_, SIGKILL);
    siginfo_t info{};
    waitid(P_PID, static_cast<id_t>(process_), &info, WEXITED | WNOWAIT);
  }

 private:
  static SharedMemoryAddress share(SharedMemoryAddress address, int64_t bytes) {
    address.process = getpid();
    address.bytes = bytes;
    address.descriptor = memfd_create("zero", MFD_ALLOW_SEALING);
    const auto file = static_cast<int>(address.descriptor);
    const std::string sevens(static_cast<size_t>(bytes), 7);
    const bool made = pwrite(file, sevens.data(), sevens.size(), 0) == ssize_t{bytes} &&
                      pwrite(file, address.password.data(), sizeof(address.password), 0) ==
                          ssize_t{sizeof(address.password)} &&
                      fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
    return made ? address : SharedMemoryAddress();
  }

  pid_t process_ = -1;
  SharedMemoryAddress address_;
};

TEST(SharedMemory, ThatOfAKilledProcessIsGivenBackThoughItIsMapped) {
  constexpr int64_t kBytes = 64 << 20;
  OtherProcess other(kBytes);
  const auto peer = PeerMemory::open(other.address());
  ASSERT_TRUE(peer);
  const auto* const bytes = static_cast<const char*>(peer->at(0, kBytes));
  EXPECT_EQ(std::count(bytes + kPage, bytes + kBytes, 7), kBytes - kPage);
  // One that is in the middle of it goes on.
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::thread reader([&] {
    std::string copy(kBytes - kPage, '\0');
    while (!stop) {
      std::memcpy(copy.data(), bytes + kPage, copy.size());
      for (const char byte : copy) wrong += byte != 7 && byte != 0;
    }
  });
  PeerMemory::give_back_ended();
  EXPECT_TRUE(peer->is_there());
  EXPECT_EQ(bytes[kBytes - 1], 7);
  const int64_t before = resident_shared_kib();
  EXPECT_GE(before, kBytes >> 10);
  other.kill_it();
  PeerMemory::give_back_ended();
  EXPECT_FALSE(peer->is_there());
  EXPECT_EQ(bytes[kBytes - 1], 0);
  EXPECT_LE(resident_shared_kib(), before - (kBytes >> 10));
  stop = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_FALSE(PeerMemory::open(other.address()));
}

TEST(SharedMemory, MoreThanThereIsIsRefused) {
  const auto memory = SharedMemory::instance();
  EXPECT_FALSE(memory->allocate(memory->address().bytes).defined());
  EXPECT_TRUE(memory->allocate(kPage).defined());
}

// With vm.overcommit_memory=2, where the first use of such memory would be a SIGBUS.
TEST(SharedMemory, WhatTheSystemCannotBackIsRefusedWhereItSaysSo) {
  const auto memory = SharedMemory::instance();
  const bool strict = std::exchange(SharedMemory::overcommit_is_strict, true);
  const at::Tensor backed = memory->allocate(4 * kPage);
  ASSERT_TRUE(backed.defined());
  const int64_t offset = *memory->offset_of(backed);
  const auto blocks_of_file = [&] {
    struct stat status {};
    EXPECT_EQ(fstat(static_cast<int>(memory->address().descriptor), &status), 0);
    return status.st_blocks;
  };
  const auto before = blocks_of_file();
  EXPECT_EQ(backed.sum().item<int64_t>(), 0);
  EXPECT_EQ(blocks_of_file(), before) << "it had its memory before it was touched";
  pages_are_refused = true;
  EXPECT_FALSE(memory->allocate(kPage).defined());
  pages_are_refused = false;
  EXPECT_EQ(*memory->offset_of(memory->allocate(kPage)), offset + 4 * kPage) << "it was freed";
  SharedMemory::overcommit_is_strict = strict;
}

TEST(SharedMemory, TheAddressSpaceHasRoomForARankOnEachCore) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  EXPECT_EQ(SharedMemory::file_bytes(64 * kGiB, 16), 64 * kGiB);
  for (const int64_t cores : {1, 64, 100, 512}) {
    const int64_t bytes = SharedMemory::file_bytes(2048 * kGiB, cores);
    EXPECT_LE(bytes, 2048 * kGiB);
    EXPECT_LE(bytes * cores, int64_t{1} << 46);
    EXPECT_GE(bytes, 128 * kGiB);
    EXPECT_EQ(bytes % kPage, 0);
  }
}

#if !defined(__SANITIZE_ADDRESS__)
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text;
};

TEST(SharedMemory, AMappingWithoutRoomInTheAddressSpaceIsAWarningWithItsSize) {
  const SharedMemoryAddress address = SharedMemory::instance()->address();
  EXPECT_TRUE(in_another_process([&] {
    Warnings warnings;
    c10::WarningUtils::set_warning_handler(&warnings);
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = static_cast<rlim_t>(address.bytes);  // one is mapped already
    setrlimit(RLIMIT_AS, &limit);
    const bool refused = PeerMemory::open(address) == nullptr;
    const std::string expected =
        c10::str("cannot map the ", address.bytes >> 20, " MiB of process ", address.process, ": ");
    return refused && warnings.text.find(expected) != std::string::npos &&
           warnings.text.find("fewer ranks") != std::string::npos;
  }));
}
#endif

TEST(SharedMemory, AForkedProcessDoesNotGiveOutItsParentsMemory) {
  ASSERT_TRUE(SharedMemory::instance());
  at::Tensor block = SharedMemory::instance()->allocate(kPage);
  block.fill_(5);
  EXPECT_TRUE(in_another_process([&] {
    const bool none = SharedMemory::instance() == nullptr;
    block = at::Tensor();  // frees nothing of the parent's
    return none;
  }));
  EXPECT_EQ(block.min().item<uint8_t>(), 5);
}

}  // namespace
}  // namespace zero
