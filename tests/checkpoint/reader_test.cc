// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Checkpoints without an optimizer: pieces of tensors, and files that are not what the manifest
// says.
#include "zero/checkpoint/format/reader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/match/part_reader.h"

namespace zero {
namespace {

std::string fresh_folder(const std::string& name) {
  const std::string path = ::testing::TempDir() + "/" + name;
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
  return path;
}

// The reader believes no promise of a manifest before it has looked at the file.
TEST(ReaderTest, SizesAreComparedWithTheFileBeforeMemoryIsTaken) {
  const std::string folder = fresh_folder("promises");
  const int64_t huge = int64_t{1} << 62;  // times 4 bytes is 0 in 64 bits
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {huge / 16}, {1}, at::kByte, 0}};
  const ManifestTensor none{"p", "master", 0, 0}, promised{"p", "master", 0, huge};
  const FileToSave file{"f", {{none, at::empty({0})}, {promised, at::empty({0})}}};
  m.files = {write_file(file, folder + "/f", m.id).about};
  m.tensors = tensors_by_name({promised});
  const at::Tensor into = at::ones({4});
  const auto expect_refused = [&](const std::function<void(CheckpointReader&)>& read,
                                  const std::string& words) {
    std::ofstream(folder + "/" + kManifestName, std::ios::binary) << manifest_text(m);
    expect_words(error_of([&] {
                   CheckpointReader reader(folder);
                   read(reader);
                 }),
                 {words});
  };
  const std::vector<WantedRange> all = {{"p", 0, numel(m.parameters[0])}};
  const auto read_all = [&](auto& reader) { reader.read_all("master", all); };
  const std::string none_of_floats = "elements of Float, got 0 bytes";
  const std::string none_of_bytes = "elements of Byte, got 0 bytes";
  expect_refused(
      [&](auto& reader) {
        reader.read("master", {{"p", 0, 4}}, {into});
      },
      none_of_floats);
  expect_refused(read_all, none_of_floats);
  expect_refused([&](auto& reader) { reader.read_all("master", all, at::kByte); }, none_of_bytes);
  expect_refused([&](auto& reader) { reader.read_uncut("p", "master"); }, none_of_floats);
  expect_refused([&](auto& reader) { reader.read_bytes("p", "master"); }, none_of_bytes);
  m.tensors = tensors_by_name({none});
  expect_refused(read_all, "expected element 0 in a stored range, got none");
  m.tensors = tensors_by_name({promised});
  m.files[0].bytes = huge;
  expect_refused(read_all, "bytes as the manifest says, got");
}

// Writes files into the folder, and a manifest of them.
void write_checkpoint(const std::string& folder, Manifest m, const std::vector<FileToSave>& files) {
  std::vector<FileContent> contents;
  for (const FileToSave& file : files) {
    contents.push_back(write_file(file, folder + "/" + file.name, m.id));
  }
  add_files(contents, m);
  std::ofstream(folder + "/" + kManifestName, std::ios::binary) << manifest_text(m);
}

// Finding the rows of a whole takes time for each, so no more are looked for than files can have.
TEST(ReaderTest, PartsThatAreNotThereAreRefusedBeforeTheirRowsAreLookedFor) {
  const std::string folder = fresh_folder("hostile_parts");
  const int64_t rows = int64_t{1} << 50;
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {rows, 1}, {1, 1}, at::kFloat, 0, {rows, 2}, 1, 0},
                  {"p", {rows, 1}, {1, 1}, at::kFloat, 0, {rows, 2}, 1, 1}};
  const FileToSave file{"f",
                        {{{"p{1:0:1}", "master", 0, rows}, at::empty({0})},
                         {{"p{1:1:2}", "master", 0, rows}, at::empty({0})}}};
  write_checkpoint(folder, m, {file});
  expect_words(error_of([&] { export_model(folder, folder + "/model"); }),
               {"elements of Float, got 0 bytes"});
  // Parts of a whole that is larger than they are together.
  m.parameters.pop_back();
  m.parameters[0].shape = {rows, 0};
  std::filesystem::remove(folder + "/f");
  write_checkpoint(folder, m, {{"f", {{{"p{1:0:0}", "master", 0, 0}, at::empty({0})}}}});
  expect_words(error_of([&] { export_model(folder, folder + "/model"); }),
               {"expected parts of", "elements together, got 0"});
}

// A part that is listed twice is there once.
TEST(ReaderTest, PartsAreCountedOnceHoweverOftenTheyAreListed) {
  const std::string folder = fresh_folder("part_twice");
  Manifest m;
  m.id = "1";
  const ManifestParameter part{"p", {4, 1}, {1, 1}, at::kFloat, 0, {4, 2}, 1, 0};
  m.parameters = {part, part};
  write_checkpoint(folder, m, {{"f", {{{"p{1:0:1}", "master", 0, 4}, at::ones({4})}}}});
  expect_words(error_of([&] { export_model(folder, folder + "/model"); }),
               {"expected parts of 8 elements together, got 4"});
}

TEST(ReaderTest, PartsOfDifferentWholesAreRefused) {
  const std::string folder = fresh_folder("other_wholes");
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {4, 1}, {1, 1}, at::kFloat, 0, {4, 2}, 1, 0},
                  {"p", {4, 1}, {1, 1}, at::kFloat, 0, {4, 3}, 1, 1}};
  write_checkpoint(folder, m, {{"f", {{{"p{1:0:1}", "master", 0, 4}, at::ones({4})}}}});
  expect_words(error_of([&] { export_model(folder, folder + "/model"); }),
               {"parameter p: expected parts of one tensor", "[4, 2] and [4, 3]"});
}

TEST(ReaderTest, StateThatAPartLacksIsNotExported) {
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {4, 1}, {1, 1}, at::kFloat, 0, {4, 2}, 1, 0},
                  {"p", {4, 1}, {1, 1}, at::kFloat, 0, {4, 2}, 1, 1}};
  const at::Tensor step = at::ones({1}, at::kLong);
  FileToSave file{"f",
                  {{{"p{1:0:1}", "master", 0, 4}, at::ones({4})},
                   {{"p{1:0:1}", "step", 0, 4}, step},
                   {{"p{1:1:2}", "master", 0, 2}, at::ones({2})},
                   {{"p{1:1:2}", "master", 2, 2}, at::ones({2})}}};
  const auto refusal = [&](const std::string& name) {
    const std::string folder = fresh_folder(name);
    write_checkpoint(folder, m, {file});
    return error_of([&] { export_optimizer_state(folder, folder + "/state"); });
  };
  expect_words(refusal("no_step"), {"parameter p", "got parts that differ",
                                    "export the state of a run without tensor parallelism"});
  file.tensors.push_back({{"p{1:1:2}", "step", 0, 2}, step});  // of half a part
  expect_words(refusal("half_a_step"), {"expected element 2 in a stored range, got none"});
}

// What is taken of a checkpoint in pieces of 8 elements by a rank that needs `held`.
struct Taken {
  int64_t masters = 0;  // elements
  int64_t steps = 0;    // one of each piece
};

Taken taken(const std::vector<ManifestParameter>& stored, const ManifestParameter& held) {
  Manifest m;
  m.parameters = stored;
  CheckpointReader reader("memory", m, [](const ManifestFile&) { return nullptr; });
  NeededTensors needed;
  needed.add(PartReader(reader).find(held, 0, numel(held)));
  Taken result;
  for (const ManifestParameter& p : stored) {
    for (int64_t begin = 0; begin < numel(p); begin += 8) {
      if (needed.contains({stored_name(p), "master", begin, 8})) result.masters += 8;
      if (needed.contains({stored_name(p), "step", begin, 8})) ++result.steps;
    }
  }
  return result;
}

// A value stands for all elements from the first to the last, and is small.
TEST(NeededTensorsTest, ARankTakesTheTensorsOfItsPartAndTheValuesBetweenThem) {
  // The rows of q, k and v in one matrix.
  const auto rows = [](int64_t size, int64_t from) {
    return ManifestParameter{"w", {size, 8}, {8, 1}, at::kFloat, 0, {12, 8}, 0, from, {4, 4, 4}};
  };
  for (const int64_t from : {0, 3, 6, 9}) {
    const Taken of_halves = taken({rows(6, 0), rows(6, 6)}, rows(3, from));
    EXPECT_EQ(of_halves.masters, 3 * 8);
    EXPECT_EQ(of_halves.steps, 5);
    const Taken of_whole = taken({{"w", {12, 8}, {8, 1}, at::kFloat, 0}}, rows(3, from));
    EXPECT_EQ(of_whole.masters, 3 * 8);
    EXPECT_EQ(of_whole.steps, 9);
  }
  // Experts, each cut along its rows.
  for (const int64_t from : {0, 3}) {
    const Taken experts = taken({{"w", {4, 6, 8}, {48, 8, 1}, at::kFloat, 0}},
                                {"w", {4, 3, 8}, {24, 8, 1}, at::kFloat, 0, {4, 6, 8}, 1, from});
    EXPECT_EQ(experts.masters, 4 * 3 * 8);
    EXPECT_EQ(experts.steps, 21);
  }
}

TEST(ReaderTest, AWholeTensorOfAnotherSizeThanItsShapeIsNotExported) {
  const std::string folder = fresh_folder("other_size");
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {2}, {1}, at::kFloat, 0}};
  write_checkpoint(folder, m, {{"f", {{{"p", "master", 0, 6}, at::ones({6})}}}});
  expect_words(error_of([&] { export_model(folder, folder + "/model"); }),
               {"expected parts of 2 elements together, got 6"});
}

TEST(ReaderTest, WhatIsStoredOnceIsComparedWithItsFileAlsoWithoutElements) {
  const std::string folder = fresh_folder("no_elements");
  Manifest m;
  m.id = "1";
  write_checkpoint(folder, m,
                   {{"f",
                     {{{"p", "uncut:a", 0, 0}, at::empty({0}, at::kLong)},
                      {{"q", "uncut:a", 0, 0}, at::ones({3})}}}});
  CheckpointReader reader(folder);
  EXPECT_EQ(reader.read_uncut("p", "uncut:a").scalar_type(), at::kLong);
  expect_words(error_of([&] { reader.read_uncut("q", "uncut:a"); }),
               {"expected 0 elements of Float, got 12 bytes"});
}

// The parameter "p" of six elements in three pieces over two files, a state and a buffer.
class PiecesReaderTest : public ::testing::Test {
 protected:
  PiecesReaderTest() : folder_(fresh_folder("pieces")) {
    Manifest m;
    m.id = "1";
    m.parameters = {{"p", {2, 3}, {3, 1}, at::kFloat, 0}};
    m.buffers = {{"b", {2}, {}, at::kLong, 0}};
    write_checkpoint(folder_, m, {{"a", tensors_of_a()}, {"b", tensors_of_b()}});
  }

  static std::vector<TensorToSave> tensors_of_a() {
    return {{{"p", "master", 0, 1}, at::arange(0.0f, 1.0f)},
            {{"p", "master", 4, 2}, at::arange(4.0f, 6.0f)},
            {{"p", "step", 0, 4}, at::ones({1}, at::kLong)}};
  }
  static std::vector<TensorToSave> tensors_of_b() {
    return {{{"p", "master", 1, 3}, at::arange(1.0f, 4.0f)},
            {{"b", "buffer", 0, 2}, at::arange(2)},
            {{".note", "state", 0, 3}, at::arange(97, 100, at::kByte)},
            {{"p", "step", 4, 2}, at::ones({1}, at::kLong)}};
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
  EXPECT_TRUE(reader.read_all("master", {{"p", 3, 3}, {"p", 0, 2}})
                  .equal(at::tensor({3.0f, 4.0f, 5.0f, 0.0f, 1.0f})));
  EXPECT_TRUE(reader.read_all("buffer", {{"b", 0, 2}}, at::kLong).equal(at::arange(2)));
  EXPECT_EQ(reader.read_bytes(".note", "state"), "abc");
}

// A file for each of 1000 ranks, and a process that may open 256.
TEST(ReaderTest, MoreFilesThanCanBeOpenAreRead) {
  constexpr int64_t kFiles = 1000;
  const std::string folder = fresh_folder("many_files");
  Manifest m;
  m.id = "1";
  m.parameters = {{"p", {kFiles}, {1}, at::kFloat, 0}};
  std::vector<FileToSave> files;
  for (int64_t f = 0; f < kFiles; ++f) {
    files.push_back({"rank-" + std::to_string(f),
                     {{{"p", "master", f, 1}, at::full({1}, static_cast<double>(f), at::kFloat)}}});
  }
  write_checkpoint(folder, m, files);
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const rlimit few{256, before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  EXPECT_EQ(error_of([&] {
              CheckpointReader reader(folder);
              for (int64_t f = 0; f < kFiles; ++f) reader.verify_file(f);
              EXPECT_TRUE(reader.read_all("master", {{"p", 0, kFiles}})
                              .equal(at::arange(static_cast<float>(kFiles))));
              // Again the first one, whose file was closed and is another one now.
              std::filesystem::resize_file(folder + "/rank-0",
                                           reader.manifest().files[0].bytes + 1);
              reader.verify_file(0);
            }).find("changed") == std::string::npos,
            false);
  setrlimit(RLIMIT_NOFILE, &before);
}

// A file that counts how often it is opened.
class CountedFile final : public StoredBytes {
 public:
  CountedFile(const std::string& path, int& opened)
      : StoredBytes(path, std::filesystem::file_size(path)), opened_(opened) {}

  void read(uint64_t offset, void* data, size_t bytes) override {
    if (!file_) {
      file_ = std::make_unique<FileReader>(path());
      ++opened_;
    }
    file_->read(offset, data, bytes);
  }
  void release() override { file_.reset(); }

 private:
  int& opened_;
  std::unique_ptr<FileReader> file_;
};

// Ranks cut each of many parameters, so that all of their files have pieces of all parameters.
TEST(ReaderTest, EachFileIsOpenedOnceForAllParameters) {
  constexpr int64_t kFiles = 64, kParameters = 10;
  const std::string folder = fresh_folder("opened_once");
  Manifest m;
  m.id = "1";
  std::vector<FileToSave> files(kFiles);
  std::vector<WantedRange> wanted;
  std::vector<at::Tensor> into;
  for (int64_t p = 0; p < kParameters; ++p) {
    const std::string name = "p" + std::to_string(p);
    m.parameters.push_back({name, {kFiles}, {1}, at::kFloat, 0});
    for (int64_t f = 0; f < kFiles; ++f) {
      files[f].name = "rank-" + std::to_string(f);
      const at::Tensor value = at::full({1}, static_cast<double>(p * kFiles + f), at::kFloat);
      files[f].tensors.push_back({{name, "master", f, 1}, value});
      files[f].tensors.push_back({{name, "step", f, 1}, at::full({1}, p, at::kLong)});
    }
    wanted.push_back({name, 0, kFiles});
    into.push_back(at::empty({kFiles}));
  }
  write_checkpoint(folder, m, files);
  int opened = 0;
  CheckpointReader reader(folder, read_manifest(folder), [&](const ManifestFile& file) {
    return std::make_unique<CountedFile>(folder + "/" + file.name, opened);
  });
  reader.read("master", wanted, into);
  EXPECT_EQ(std::exchange(opened, 0), kFiles);
  for (int64_t p = 0; p < kParameters; ++p) {
    const at::Tensor expected = at::arange(kFiles) + p * kFiles;
    EXPECT_TRUE(into[p].equal(expected.to(at::kFloat))) << p;
  }
  const std::vector<at::Tensor> steps = reader.read_values("step", wanted);
  EXPECT_EQ(opened, kFiles);
  for (int64_t p = 0; p < kParameters; ++p) EXPECT_EQ(steps[p].item<int64_t>(), p);
}

// Bytes are stored for dtypes that safetensors lacks, and fit elements of several sizes.
TEST(ReaderTest, RangesOfOnePieceHaveOneDtype) {
  const std::string folder = fresh_folder("dtypes");
  Manifest m;
  m.id = "1";
  write_checkpoint(folder, m, {{"f", {{{"p", "x", 0, 4}, at::ones({16}, at::kByte)}}}});
  CheckpointReader reader(folder);
  const at::Tensor wide = at::empty({2}), narrow = at::empty({2}, at::kHalf);
  expect_words(error_of([&] {
                 reader.read("x", {{"p", 0, 2}, {"p", 2, 2}}, {wide, narrow});
               }),
               {"p: expected one dtype, got Float and Half"});
}

TEST_F(PiecesReaderTest, SaysWhatIsStored) {
  CheckpointReader reader(folder_);
  EXPECT_EQ(reader.manifest().id, "1");
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
               {"element 6", "got none", "parameter 0 is p"});
}

// A save refuses them; a checkpoint that was put together by hand may have them.
TEST_F(PiecesReaderTest, PiecesWithDifferentValuesAreRefused) {
  const std::string folder = folder_ + "/differ";
  std::filesystem::create_directories(folder);
  const FileToSave file{"a",
                        {{{"p", "step", 0, 4}, at::ones({1}, at::kLong)},
                         {{"p", "step", 4, 2}, at::zeros({1}, at::kLong)}}};
  Manifest m;
  m.id = "1";
  FileContent content = write_file(file, folder + "/a", m.id);
  content.values.clear();
  add_files({content}, m);
  std::ofstream(folder + "/" + kManifestName, std::ios::binary) << manifest_text(m);
  CheckpointReader reader(folder);
  EXPECT_EQ(reader.read_values("step", {{"p", 0, 4}})[0].item<int64_t>(), 1);
  expect_words(error_of([&] {
                 reader.read_values("step", {{"p", 0, 6}});
               }),
               {"parameter p: expected one step for all its pieces"});
}

}  // namespace
}  // namespace zero
