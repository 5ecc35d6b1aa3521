// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// list_checkpoints() finds the checkpoints of a folder and orders them.
#include "zero/checkpoint/folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <new>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/forged_manifest.h"
#include "zero/checkpoint.h"
#include "zero/checkpoint/format/atomic_directory.h"
#include "zero/checkpoint/format/manifest.h"

namespace {
thread_local int64_t allocations = 0;
}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace zero {
namespace {

namespace fs = std::filesystem;

class CheckpointListTest : public ::testing::Test {
 protected:
  CheckpointListTest() : parent_(::testing::TempDir() + "/list") {
    fs::remove_all(parent_);
    fs::create_directories(parent_);
  }

  void write(const std::string& name, int64_t saved, int64_t steps, int64_t skipped = 0) {
    Manifest m;
    m.id = "1";
    m.saved = saved;
    m.steps = steps;
    m.skipped_steps = skipped;
    fs::create_directories(parent_ + "/" + name);
    std::ofstream(parent_ + "/" + name + "/" + kManifestName) << manifest_text(m);
  }

  // Names, the newest last.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const ListedCheckpoint& c : list_checkpoints(parent_)) {
      result.push_back(fs::path(c.path).filename().string());
    }
    return result;
  }

  const std::string parent_;
};

using Names = std::vector<std::string>;

TEST_F(CheckpointListTest, TheOneThatWasSavedLastIsLast) {
  write("c", 10, 300);
  write("a", 30, 100);
  write("b", 20, 200);
  EXPECT_EQ(names(), (Names{"c", "b", "a"}));
  const auto last = list_checkpoints(parent_).back();
  EXPECT_EQ(last.path, parent_ + "/a");
  EXPECT_EQ(last.saved, 30);
  EXPECT_EQ(last.steps, 100);
}

TEST_F(CheckpointListTest, WithoutATimeTheyComeFirstBySteps) {
  write("new", 1, 0);
  write("z", 0, 5);
  write("b", 0, 3, 4);
  write("y", 0, 5);
  EXPECT_EQ(names(), (Names{"y", "z", "b", "new"})) << "equals by path; skipped steps count";
}

TEST_F(CheckpointListTest, OnlyFoldersWithAValidManifestCount) {
  write("good", 1, 1);
  write("damaged", 2, 1);
  std::ofstream(parent_ + "/damaged/" + kManifestName, std::ios::app) << "x";
  fs::create_directories(parent_ + "/empty");
  std::ofstream(parent_ + "/file") << "x";
  write(".hidden", 3, 1);
  fs::create_directory_symlink("good", parent_ + "/link");
  EXPECT_EQ(names(), Names{"good"});
  write("better", 2, 1);
  EXPECT_EQ(keep_last(parent_, 1), Names{parent_ + "/good"});
  EXPECT_EQ(names(), Names{"better"});
  EXPECT_TRUE(fs::exists(parent_ + "/damaged") && fs::exists(parent_ + "/empty"));
}

// A large model on many ranks has millions of pieces, and a folder has many checkpoints.
TEST_F(CheckpointListTest, WhatIsInTheirFilesIsNotParsed) {
  const auto allocations_for = [&](int64_t tensors) {
    Manifest m;
    m.id = "1";
    m.saved = 1;
    m.files = {{"f", 3, 1, 0}};
    for (int64_t t = 0; t < tensors; ++t) {
      m.tensors.push_back({"p" + std::to_string(t), {"master", "exp_avg"}, {{0, 0, 1}}});
    }
    fs::create_directories(parent_ + "/1");
    std::ofstream(parent_ + "/1/" + kManifestName) << manifest_text(m);
    std::ofstream(parent_ + "/1/f") << "xxx";
    const int64_t before = allocations;
    EXPECT_EQ(latest(parent_), parent_ + "/1");
    EXPECT_TRUE(keep_last(parent_, 1).empty());
    return allocations - before;
  };
  EXPECT_LT(allocations_for(1000), allocations_for(1) + 100);
}

// An interrupted copy has the manifest first, since names are copied in their order.
TEST_F(CheckpointListTest, OneWithoutAllOfItsFilesIsNeitherTheLatestNorCounted) {
  for (int64_t i = 1; i <= 5; ++i) {
    const std::string folder = parent_ + "/" + std::to_string(i);
    Manifest m;
    m.id = "1";
    m.saved = i;
    m.files = {{"rank-00000.safetensors", 3, 1, {}}, {"rank-00001.safetensors", 3, 1, {}, 7}};
    fs::create_directories(folder);
    std::ofstream(folder + "/" + kManifestName) << manifest_text(m);
    if (i != 4) std::ofstream(folder + "/rank-00000.safetensors") << (i == 5 ? "xx" : "xxx");
  }
  EXPECT_EQ(latest(parent_), parent_ + "/3");
  EXPECT_TRUE(keep_last(parent_, 3).empty());
  EXPECT_EQ(keep_last(parent_, 1), (Names{parent_ + "/1", parent_ + "/2"}));
  EXPECT_EQ(names(), (Names{"3", "4", "5"}));
}

// An older one in its place would be loaded in silence.
TEST_F(CheckpointListTest, OneThatCannotBeReadIsAnErrorOfTheLatestAlone) {
  write("1", 1, 1);
  write("2", 2, 2);
  const std::string newest = parent_ + "/2/" + kManifestName;
  const auto expect_error = [&](const std::vector<std::string>& words) {
    expect_words(error_of([&] { latest(parent_); }), words);
    EXPECT_EQ(names(), Names{"1"}) << "as keep_last() counts";
  };
  {
    fs::rename(newest, newest + "-");
    fs::create_symlink(newest, newest);
    expect_error({"cannot look at " + newest, "errno 40"});
    fs::remove(newest);
    fs::rename(newest + "-", newest);
  }
  std::signal(SIGIO, SIG_IGN);
  const int leased = open(newest.c_str(), O_RDWR | O_CLOEXEC);
  if (fcntl(leased, F_SETLEASE, F_WRLCK) == 0) {  // not every file system has them
    expect_error({"cannot open " + newest, "errno 11"});
  }
  close(leased);
  EXPECT_EQ(latest(parent_), parent_ + "/2");
}

TEST_F(CheckpointListTest, OneOfALaterVersionIsAnErrorOfTheLatestAlone) {
  write("1", 1, 1);
  fs::create_directories(parent_ + "/2");
  const std::string version = "\"version\":";
  std::ofstream(parent_ + "/2/" + kManifestName)
      << forged(version + std::to_string(kCheckpointVersion), version + "99");
  expect_words(error_of([&] { latest(parent_); }), {parent_ + "/2/", "got 99"});
  EXPECT_EQ(names(), Names{"1"});
}

TEST_F(CheckpointListTest, ADamagedOneIsAWarningThatNamesIt) {
  write("1", 1, 1);
  write("2", 2, 2);
  std::ofstream(parent_ + "/2/" + kManifestName, std::ios::app) << "x";
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(latest(parent_), parent_ + "/1");
  expect_words(::testing::internal::GetCapturedStderr(),
               {"passed over", parent_ + "/2/" + kManifestName, "checksum"});
}

TEST_F(CheckpointListTest, AFolderThatIsNotThereHasNone) {
  EXPECT_TRUE(list_checkpoints(parent_ + "/none").empty());
  EXPECT_EQ(latest(parent_ + "/none"), std::nullopt);
  EXPECT_EQ(latest(parent_), std::nullopt);
  EXPECT_ANY_THROW(keep_last(parent_, 0));
}

}  // namespace
}  // namespace zero
