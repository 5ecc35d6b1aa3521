// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/memory_file.h: a file in memory is the file that a save would
// write, and the memory that such files get.
#include "zero/checkpoint/memory_file.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace zero {
namespace {

// With every kind of tensor that a save can meet.
FileToSave file_of_all_kinds() {
  const std::vector<at::Tensor> tensors = {
      at::arange(300 * 1000 + 1, at::kFloat),
      at::arange(1000, at::kLong).reshape({10, 100}).t(),
      at::full({}, 7, at::kLong),
      at::empty({0, 4}, at::kFloat),
      at::arange(5, at::kHalf),
      at::full({3}, 2, at::kComplexDouble),  // stored as bytes
  };
  FileToSave file{"rank", {}};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string key = "t" + std::to_string(i);
    file.tensors.push_back({{key, "buffer", 0, tensors[i].numel()}, tensors[i].clone()});
  }
  return file;
}

std::string content(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

TEST(MemoryFileTest, ItHasTheBytesAndHashesOfTheFile) {
  const std::string path = ::testing::TempDir() + "/memory_file";
  std::filesystem::remove(path);
  FileToSave file = file_of_all_kinds();
  const FileContent disk = write_file(file, path, "an id");

  for (size_t i = 0; i < file.tensors.size(); i += 2) file.tensors[i].bucket = i % 3;
  MemoryFileWriter writer(file, "an id", fresh_memory);
  writer.copy()->copy_all();
  const MemoryFile made = writer.finish();
  EXPECT_EQ(files_text({made.content}), files_text({disk}));
  EXPECT_EQ(made.content.about.name, "rank");
  FileReader stored(path);
  EXPECT_EQ(content(made.bytes), stored.read_text(0, stored.size()));
}

TEST(MemoryFileTest, WhatHasNoBucketIsCopiedAtOnceAndTheRestIsNot) {
  FileToSave file{"rank", {}};
  std::vector<at::Tensor> live;
  for (int64_t i = 0; i < 3; ++i) {
    live.push_back(at::full({3}, static_cast<double>(i), at::kFloat));
    file.tensors.push_back({{"t" + std::to_string(i), "buffer", 0, 3}, live.back()});
  }
  file.tensors[0].bucket = 0;
  file.tensors[2].bucket = 1;
  MemoryFileWriter writer(file, "an id", fresh_memory);
  const auto copies = writer.copy();
  live[1].fill_(-1);
  live[2].fill_(5);
  copies->copy_all();
  const at::Tensor bytes = writer.finish().bytes;
  constexpr int64_t kTable = 3 * 8;
  const at::Tensor values =
      bytes.slice(0, bytes.numel() - kTable - 36, bytes.numel() - kTable).clone().view(at::kFloat);
  EXPECT_EQ(values[0].item<float>(), 0);
  EXPECT_EQ(values[3].item<float>(), 1);
  EXPECT_EQ(values[6].item<float>(), 5);
}

TEST(MemoryFileTest, MemoryIsTakenAgainWhenNothingIsInItAnyMore) {
  for (const int64_t bytes : {int64_t{100}, int64_t{3} << 20}) {
    KeptMemory memory;
    at::Tensor first = memory.allocate(bytes);
    at::Tensor second = memory.allocate(bytes);
    EXPECT_NE(second.const_data_ptr(), first.const_data_ptr()) << "the first one is in use";
    const void* const seconds = second.const_data_ptr();
    const at::Tensor view = second.narrow(0, 10, 10);
    second.reset();
    EXPECT_NE(memory.allocate(bytes).const_data_ptr(), seconds) << "a view of it is in use";
    const at::Tensor third = memory.allocate(bytes);
    const at::Tensor larger = memory.allocate(bytes + 1);
    EXPECT_EQ(third.numel(), bytes);
    EXPECT_EQ(larger.numel(), bytes + 1);
  }
  KeptMemory memory;
  const void* const first = memory.allocate(100).const_data_ptr();
  EXPECT_EQ(memory.allocate(100).const_data_ptr(), first);
}

// The system's description of the mapping at `address`: "hg" is in it where huge pages are asked
// for. Empty where the system does not tell.
std::string mapping_flags(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool within = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream text(line);
    if (text >> std::hex >> begin >> dash >> end && dash == '-') {
      const auto at = reinterpret_cast<uintptr_t>(address);
      within = begin <= at && at < end;
    }
    if (within && line.compare(0, 8, "VmFlags:") == 0) return line;
  }
  return {};
}

TEST(MemoryFileTest, ALargeBlockOfFreshMemoryAsksForHugePagesAndIsFreed) {
  constexpr int64_t kBytes = (int64_t{8} << 20) + 5;
  at::Tensor memory = fresh_memory(kBytes);
  EXPECT_EQ(memory.numel(), kBytes);
  memory.fill_(3);
  const void* const address = memory.const_data_ptr();
  const std::string flags = mapping_flags(address);
  if (access("/sys/kernel/mm/transparent_hugepage", F_OK) == 0 && !flags.empty()) {
    EXPECT_NE(flags.find(" hg"), std::string::npos) << flags;
  }
  EXPECT_EQ(fresh_memory(100).numel(), 100);
  EXPECT_EQ(fresh_memory(0).numel(), 0);
  EXPECT_THROW(fresh_memory(int64_t{1} << 60), c10::OutOfMemoryError);
  // Pages that are locked have nothing else. Where none is, as without a GPU, it is memory even so.
  const at::Tensor of_device = fresh_memory(100, c10::Device(c10::DeviceType::CUDA, 0));
  const auto begin = reinterpret_cast<uintptr_t>(of_device.const_data_ptr());
  EXPECT_EQ(begin % static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), 0U);
  EXPECT_TRUE(of_device.fill_(3).eq(3).all().item<bool>());
  EXPECT_EQ(fresh_memory(0, of_device.device()).numel(), 0);
  const at::Tensor view = memory.narrow(0, 4, 8).view(at::kInt);
  memory.reset();
  EXPECT_EQ(view[0].item<int>(), 0x03030303) << "a view keeps it";
}

}  // namespace
}  // namespace zero
