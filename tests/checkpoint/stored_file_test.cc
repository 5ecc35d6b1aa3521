// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/checkpoint/format/stored_file.h: a range is read and verified without the rest of the file,
// and no changed byte goes unnoticed.
#include "zero/checkpoint/format/stored_file.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/files.h"
#include "zero/base/threads.h"
#include "zero/checkpoint/format/reader.h"

namespace {
std::atomic<int> threads_that_hash{0};
}  // namespace

// In place of the C library's in the whole program.
extern "C" int pthread_setname_np(pthread_t, const char* name) noexcept {
  threads_that_hash += std::string(name) == "zero hash" ? 1 : 0;
  return 0;
}

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr auto kBlock = static_cast<int64_t>(kBlockBytes / sizeof(float));

class StoredFileTest : public ::testing::Test {
 protected:
  StoredFileTest() : path_(::testing::TempDir() + "/stored_file") { fs::remove(path_); }

  void write(const std::vector<TensorToSave>& tensors) {
    content_ = write_file({"f", tensors}, path_, "an id");
  }
  std::unique_ptr<StoredFile> open() const {
    return std::make_unique<StoredFile>(std::make_unique<FileReader>(path_), content_.about);
  }
  void flip(uint64_t byte) const {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(static_cast<std::streamoff>(byte));
    const auto old = static_cast<char>(file.get());
    file.seekp(static_cast<std::streamoff>(byte));
    file.put(static_cast<char>(old ^ 4));
  }

  const std::string path_;
  FileContent content_;
};

// Tensors of no block, of one that is not full, of one that is, and of several.
std::vector<TensorToSave> tensors_of_all_sizes() {
  return {{{"a", "master", 0, 0}, at::empty({0})},
          {{"b", "master", 2, 3}, at::arange(3.0f)},
          {{"c", "master", 0, kBlock}, at::arange(static_cast<float>(kBlock))},
          {{"d", "master", 7, 2 * kBlock + 1}, at::arange(static_cast<float>(2 * kBlock + 1))},
          {{"d", "step", 7, 2 * kBlock + 1}, at::full({1}, 5, at::kLong)},
          {{"e", "buffer", 0, 2}, at::full({2}, 1, at::kComplexFloat)}};
}

TEST_F(StoredFileTest, TheTableHasOneHashForEachBlockAndIsTheEndOfTheFile) {
  write(tensors_of_all_sizes());
  EXPECT_EQ(content_.about.bytes, fs::file_size(path_));
  EXPECT_EQ(content_.about.blocks, 1 + 1 + 3 + 1 + 1);
  const std::string bytes = content(path_);
  // Wide dtypes come first, so the step's hash is the first one.
  const int64_t step = 5;
  const uint64_t expected = content_hash(&step, sizeof(step));
  uint64_t first = 0;
  std::memcpy(&first, bytes.data() + bytes.size() - 7 * 8, sizeof(first));
  EXPECT_EQ(first, expected);
  ASSERT_EQ(content_.values.size(), 1u);
  EXPECT_EQ(content_.values[0].owner, "d");
  EXPECT_EQ(content_.values[0].hash, expected);
}

// Of frozen parameters, while the training waits.
TEST_F(StoredFileTest, AFileIsHashedOnSeveralThreadsAsItIsWritten) {
  std::vector<TensorToSave> tensors = tensors_of_all_sizes();
  tensors.push_back({{"f", "frozen", 0, 200 * kBlock + 1}, at::arange(200.0f * kBlock + 1)});
  write(tensors);
  const int before = at::get_num_threads();
  at::set_num_threads(3);
  EXPECT_EQ(hash_file({"f", tensors}, "an id").about.hash, content_.about.hash);
  EXPECT_EQ(threads_that_hash, 2);
  threads_refused = true;
  EXPECT_EQ(hash_file({"f", tensors}, "an id").about.hash, content_.about.hash);
  threads_refused = false;
  EXPECT_EQ(threads_that_hash, 2);
  at::set_num_threads(before);
}

TEST_F(StoredFileTest, AChangedByteAnywhereIsNoticed) {
  write({{{"b", "master", 2, 3}, at::arange(3.0f)},
         {{"b", "step", 2, 3}, at::full({1}, 5, at::kLong)},
         {{"e", "buffer", 0, 2}, at::full({2}, 1, at::kByte)}});
  EXPECT_EQ(error_of([&] { open()->verify_rest(nullptr); }), "");
  for (uint64_t byte = 0; byte < content_.about.bytes; ++byte) {
    flip(byte);
    EXPECT_NE(error_of([&] { open()->verify_rest(nullptr); }), "") << byte;
    flip(byte);
  }
  for (uint64_t bytes = 0; bytes < content_.about.bytes; ++bytes) {
    fs::resize_file(path_, bytes);
    EXPECT_NE(error_of([&] { open(); }), "") << bytes;
  }
}

TEST_F(StoredFileTest, ARangeReadsItsBlocksAndNoOthers) {
  write(tensors_of_all_sizes());
  const auto file = open();
  const uint64_t index = file->bytes_read();
  EXPECT_LT(index, 1500u);
  const StoredTensor& d = file->tensor("d[7:" + std::to_string(2 * kBlock + 8) + "].master");
  flip(d.begin + kBlockBytes);  // in its second block
  std::vector<uint64_t> given;
  const auto take = [&](uint64_t at, const char*, size_t bytes) {
    given.push_back(at);
    given.push_back(bytes);
  };
  file->read(d, 4, 8, take);
  EXPECT_EQ(given, (std::vector<uint64_t>{0, kBlockBytes}));
  EXPECT_EQ(file->bytes_read(), index + kBlockBytes);
  file->read(d, 2 * kBlockBytes, 2 * kBlockBytes + 4, take);
  EXPECT_EQ(file->bytes_read(), index + kBlockBytes + 4);
  file->read(d, 5, 5, take);
  EXPECT_EQ(file->bytes_read(), index + kBlockBytes + 4);
  expect_words(error_of([&] { file->read(d, kBlockBytes - 1, kBlockBytes + 1, take); }),
               {path_, "d[7:", "checksum", "of its bytes from 32768 on"});
  // The step, c, b, and then the damaged one, in the order of the file.
  EXPECT_EQ(std::count(file->verified().begin(), file->verified().end(), true), 2);
  file->verify_rest([&](size_t block) { return file->verified()[block] || block == 4; });
  EXPECT_EQ(std::count(file->verified().begin(), file->verified().end(), true), 6);
  EXPECT_NE(error_of([&] { file->verify_rest(nullptr); }), "");
}

// The last tensor is not the table, and the hash of the index matches all the same.
TEST_F(StoredFileTest, ATableElsewhereIsRefused) {
  const auto refusal = [&](const char* first, const char* second) {
    fs::remove(path_);
    const auto zeros = [](const char* name) {
      return TensorToWrite{name, at::kByte, {8}, [] { return at::zeros({8}, at::kByte); }};
    };
    write_safetensors_files(path_, {zeros(first), zeros(second)}, {{"checkpoint", "an id"}}, 0);
    const std::string bytes = content(path_);
    const size_t data = bytes.size() - 16;
    const std::string index = bytes.substr(0, data) + bytes.substr(bytes.size() - 8);
    content_.about = {"f", bytes.size(), content_hash(index.data(), index.size()), 1};
    return error_of([&] { open(); });
  };
  expect_words(refusal("a", "b"), {path_, "as the last tensor"});
  expect_words(refusal(kTableKey, "a"), {path_, "as the last tensor"});
  EXPECT_EQ(refusal("a", kTableKey), "");
}

// What the reader of a checkpoint makes of it: ranges that meet in a block read it once.
TEST_F(StoredFileTest, RangesOfOneBlockReadItOnce) {
  const std::string folder = ::testing::TempDir() + "/stored_folder";
  fs::remove_all(folder);
  fs::create_directories(folder);
  const int64_t numel = 4 * kBlock;
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {numel}, {1}, at::kFloat, 0}};
  const at::Tensor values = at::arange(static_cast<float>(numel));
  const FileToSave file{"f", {{{"p", "master", 0, numel}, values}}};
  add_files({write_file(file, folder + "/f", m.id)}, m);
  std::ofstream(folder + "/" + kManifestName, std::ios::binary) << manifest_text(m);
  CheckpointReader reader(folder);
  reader.verify_index(0);
  const uint64_t index = reader.bytes_read();
  // Given out of order: two in block 0, one over blocks 0 and 1, one in block 3.
  const std::vector<WantedRange> wanted = {
      {"p", 3 * kBlock + 1, 2}, {"p", kBlock - 1, 3}, {"p", 5, 1}, {"p", 6, 100}};
  std::vector<at::Tensor> into;
  for (const WantedRange& w : wanted) into.push_back(at::full({w.numel}, -1.0, at::kFloat));
  reader.read("master", wanted, into);
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT_TRUE(into[i].equal(values.narrow(0, wanted[i].begin, wanted[i].numel))) << i;
  }
  EXPECT_EQ(reader.bytes_read(), index + 3 * kBlockBytes);
  // Three blocks of four: what is left to verify is the one between.
  const at::Tensor read = reader.blocks_read();
  EXPECT_EQ(*read.const_data_ptr<int32_t>(), 0b1011);
  CheckpointReader other(folder);
  other.verify_file(0, read);
  EXPECT_EQ(other.bytes_read(), index + kBlockBytes);
}

}  // namespace
}  // namespace zero
