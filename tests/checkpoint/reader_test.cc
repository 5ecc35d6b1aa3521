// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints without an optimizer: pieces of tensors, and files that are not what the manifest
// says.
#include "zero/checkpoint/format/reader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

// The reader believes no promise of a manifest before it has looked at the file.
TEST(ReaderTest, SizesAreComparedWithTheFileBeforeMemoryIsTaken) {
  const std::string folder = ::testing::TempDir() + "/promises";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  SafetensorsWriter writer(folder + "/f", {{"k", at::kFloat, {0}, 0, 0}}, {{"checkpoint", "1"}});
  const uint64_t hash = writer.write(nullptr, 0);
  writer.finish();
  const int64_t huge = int64_t{1} << 62;  // times 4 bytes is 0 in 64 bits
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {huge / 16}, {1}, at::kByte, 0}};
  m.files = {{"f", writer.bytes(), writer.hash(), {{"k", "p", "master", 0, huge, hash}}}};
  const auto refusal = [&](const std::function<void(CheckpointReader&)>& read) -> std::string {
    std::filesystem::remove(folder + "/" + kManifestName);
    FileWriter manifest(folder + "/" + kManifestName);
    const std::string text = manifest_text(m);
    manifest.write(text.data(), text.size());
    manifest.finish();
    try {
      CheckpointReader reader(folder);
      read(reader);
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "accepted";
  };
  const at::Tensor into = at::ones({4});
  const auto expected = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expected(refusal([&](auto& reader) {
             reader.read("master", {{"p", 0, 4}}, {into});
           }),
           "elements of Float, got 0 bytes");
  expected(refusal([&](auto& reader) { reader.read_all(m.parameters[0], "master"); }),
           "elements of Float, got 0 bytes");
  expected(refusal([&](auto& reader) { reader.read_whole(m.parameters[0], "master"); }),
           "elements of Byte, got 0 bytes");
  m.files[0].tensors[0].numel = 0;
  expected(refusal([&](auto& reader) { reader.read_all(m.parameters[0], "master"); }),
           "stored elements for its shape, got 0");
  m.files[0].bytes = huge;
  expected(refusal([&](auto& reader) { reader.read_whole(m.parameters[0], "master"); }),
           "bytes as the manifest says, got");
}

// A tensor to store, and how the manifest describes it.
struct Stored {
  ManifestTensor about;
  at::Tensor tensor;
};

ManifestFile write_file(const std::string& folder, const std::string& name,
                        const std::vector<Stored>& tensors, const std::string& id = "1") {
  std::vector<StoredTensor> places;
  for (const Stored& s : tensors) {
    places.push_back({s.about.key, s.tensor.scalar_type(), s.tensor.sizes().vec(), 0, 0});
  }
  SafetensorsWriter writer(folder + "/" + name, std::move(places), {{"checkpoint", id}});
  ManifestFile file{name, 0, 0, {}};
  for (const StoredTensor& place : writer.tensors()) {
    for (const Stored& s : tensors) {
      if (s.about.key != place.name) continue;
      file.tensors.push_back(s.about);
      file.tensors.back().hash = writer.write(s.tensor.const_data_ptr(), s.tensor.nbytes());
    }
  }
  writer.finish();
  file.bytes = writer.bytes();
  file.hash = writer.hash();
  return file;
}

// The parameter "p" of six elements in three pieces over two files, a state and a buffer.
class PiecesReaderTest : public ::testing::Test {
 protected:
  PiecesReaderTest() : folder_(::testing::TempDir() + "/pieces") {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
    Manifest m;
    m.id = "1";
    m.parameters = {{"p", {2, 3}, {3, 1}, at::kFloat, 0}};
    m.buffers = {{"b", {2}, {}, at::kLong, 0}};
    m.files = {write_file(folder_, "a", tensors_of_a()), write_file(folder_, "b", tensors_of_b())};
    std::ofstream(folder_ + "/" + kManifestName, std::ios::binary) << manifest_text(m);
  }

  static std::vector<Stored> tensors_of_a() {
    return {{{"p0", "p", "master", 0, 1, 0}, at::arange(0.0f, 1.0f)},
            {{"p4", "p", "master", 4, 2, 0}, at::arange(4.0f, 6.0f)},
            {{"s0", "p", "step", 0, 4, 0}, at::ones({1}, at::kLong)}};
  }
  static std::vector<Stored> tensors_of_b() {
    return {{{"p1", "p", "master", 1, 3, 0}, at::arange(1.0f, 4.0f)},
            {{"b", "b", "buffer", 0, 2, 0}, at::arange(2)},
            {{".note", ".note", "state", 0, 3, 0}, at::arange(97, 100, at::kByte)},
            {{"s4", "p", "step", 4, 2, 0}, at::ones({1}, at::kLong)}};
  }

  const std::string folder_;
};

TEST_F(PiecesReaderTest, FillsEveryRangeFromAllFiles) {
  CheckpointReader reader(folder_);
  for (int64_t begin = 0; begin < 6; ++begin) {
    for (int64_t end = begin; end <= 6; ++end) {
      const at::Tensor into = at::empty({end - begin});
      reader.read("master", {{"p", begin, end - begin}}, {into});
      EXPECT_TRUE(into.equal(at::arange(6.0f).narrow(0, begin, end - begin))) << begin << end;
    }
  }
  EXPECT_TRUE(reader.read_all(reader.manifest().parameters[0], "master").equal(at::arange(6.0f)));
  EXPECT_TRUE(reader.read_whole(reader.manifest().buffers[0], "buffer").equal(at::arange(2)));
  EXPECT_EQ(reader.read_bytes(".note", "state"), "abc");
}

// A file for each of 1000 ranks, and a process that may open 256.
TEST(ReaderTest, MoreFilesThanCanBeOpenAreRead) {
  constexpr int64_t kFiles = 1000;
  const std::string folder = ::testing::TempDir() + "/many_files";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {kFiles}, {1}, at::kFloat, 0}};
  for (int64_t f = 0; f < kFiles; ++f) {
    const float value = static_cast<float>(f);
    std::vector<StoredTensor> tensors = {{"k", at::kFloat, {1}, 0, 0}};
    std::string bytes = lay_out_safetensors(tensors, {{"checkpoint", "1"}}, "f");
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    const uint64_t hash = content_hash(&value, sizeof(value));
    m.files.push_back({"rank-" + std::to_string(f),
                       bytes.size(),
                       content_hash(bytes.data(), bytes.size()),
                       {{"k", "p", "master", f, 1, hash}}});
    std::ofstream(folder + "/" + m.files.back().name, std::ios::binary) << bytes;
  }
  std::ofstream(folder + "/" + kManifestName, std::ios::binary) << manifest_text(m);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{256, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  EXPECT_EQ(error_of([&] {
              CheckpointReader reader(folder);
              for (int64_t f = 0; f < kFiles; ++f) reader.verify_file(f);
              EXPECT_TRUE(reader.read_all(m.parameters[0], "master")
                              .equal(at::arange(static_cast<float>(kFiles))));
              // Again the first one, whose file was closed and is another one now.
              std::filesystem::resize_file(folder + "/rank-0", m.files[0].bytes + 1);
              reader.verify_file(0);
            }).find("changed") == std::string::npos,
            false);
  setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(PiecesReaderTest, SaysWhatIsStored) {
  CheckpointReader reader(folder_);
  EXPECT_EQ(reader.id(), "1");
  EXPECT_EQ(reader.kinds("p"), (std::set<std::string>{"master", "step"}));
  EXPECT_TRUE(reader.kinds("q").empty());
  EXPECT_EQ(reader.state_names(), std::vector<std::string>{"note"});
  EXPECT_EQ(reader.dtype("step", {"p", 0, 1}), at::kLong);
  expect_words(error_of([&] {
                 reader.dtype("exp_avg", {"p", 0, 1});
               }),
               {"p", "exp_avg", "got none"});
}

TEST_F(PiecesReaderTest, AValueStandsForAllElementsOfItsPieces) {
  CheckpointReader reader(folder_);
  const auto values = reader.read_values("step", {{"p", 0, 6}, {"p", 5, 1}, {"p", 2, 0}});
  EXPECT_EQ(values[0].item<int64_t>(), 1);
  EXPECT_EQ(values[1].item<int64_t>(), 1);
  EXPECT_FALSE(values[2].defined());
  expect_words(error_of([&] {
                 reader.read_values("step", {{"p", 0, 7}});
               }),
               {"element 6", "got none", "0=p"});
}

TEST_F(PiecesReaderTest, ADamagedByteIsFoundWhereItIsReadAndOnlyThere) {
  const std::string path = folder_ + "/b";
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekg(-1, std::ios::end);
  const auto last = static_cast<char>(file.get());
  file.seekp(-1, std::ios::end);
  file.put(static_cast<char>(last ^ 1));
  file.close();
  CheckpointReader reader(folder_);
  // Bytes are stored last.
  expect_words(error_of([&] { reader.read_bytes(".note", "state"); }), {path, "checksum"});
  EXPECT_EQ(error_of([&] { reader.read_all(reader.manifest().parameters[0], "master"); }), "");
  EXPECT_EQ(error_of([&] { reader.verify_file(0); }), "");
  expect_words(error_of([&] { reader.verify_file(1); }), {path, "checksum"});
}

TEST_F(PiecesReaderTest, AFileOfAnotherCheckpointIsRefused) {
  const std::string path = folder_ + "/a";
  const auto bytes = std::filesystem::file_size(path);
  std::filesystem::remove(path);
  write_file(folder_, "a", tensors_of_a(), "2");
  CheckpointReader reader(folder_);
  expect_words(error_of([&] { reader.verify_file(0); }),
               {path, "expected a file of checkpoint 1, got one of checkpoint 2"});
  std::filesystem::resize_file(path, bytes - 1);
  CheckpointReader again(folder_);
  expect_words(error_of([&] { again.verify_file(0); }), {path, "bytes as the manifest says, got"});
}

}  // namespace
}  // namespace zero
