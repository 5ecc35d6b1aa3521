// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which run a save is of, and its place in the order of saves, whatever the clock says.
#include "zero/checkpoint/folder.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "zero/checkpoint/format/manifest.h"

namespace zero {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFuture = int64_t{9} << 50;  // microseconds: after the year 2200

std::string empty_folder(const std::string& name) {
  const std::string folder = ::testing::TempDir() + "/" + name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  return folder;
}

Manifest saved_by(const std::string& run, int64_t saved) {
  Manifest m;
  m.id = "1";
  m.run = run;
  m.saved = saved;
  return m;
}

void write_checkpoint(const std::string& folder, const Manifest& manifest) {
  fs::create_directories(folder);
  std::ofstream(folder + "/" + kManifestName) << manifest_text(manifest);
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

TEST(RunIdentityTest, EveryRunHasAnotherIdOf32Digits) {
  const RunIdentity first, second;
  EXPECT_EQ(first.id().size(), 32u);
  EXPECT_EQ(first.id().find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(first.id(), second.id());
}

TEST(RunIdentityTest, ASaveIsAtTheTimeOfTheClockAndAfterTheOneBefore) {
  RunIdentity run;
  const std::string parent = empty_folder("order");
  int64_t last = now() - 1;
  for (int i = 0; i < 1000; ++i) {
    const int64_t next = run.next_save(parent);
    EXPECT_GT(next, last);
    last = next;
  }
  EXPECT_LE(last, now() + 1000);
}

TEST(RunIdentityTest, AResumedRunKeepsItsIdAndItsOrder) {
  RunIdentity run;
  const std::string own = run.id();
  run.resume(saved_by("", 0));
  EXPECT_EQ(run.id(), own) << "an earlier version of this library had no runs";
  run.resume(saved_by("abc", kFuture));
  EXPECT_EQ(run.id(), "abc");
  EXPECT_EQ(run.next_save(empty_folder("resumed")), kFuture + 1);
  run.resume(saved_by("abc", 5));
  EXPECT_EQ(run.next_save(empty_folder("resumed")), kFuture + 2) << "the order never goes back";
}

TEST(RunIdentityTest, AClockThatWasSetBackChangesNoOrderInAFolder) {
  const std::string parent = empty_folder("clock");
  write_checkpoint(parent + "/old", saved_by("other", kFuture));
  RunIdentity run;
  EXPECT_EQ(run.next_save(parent), kFuture + 1);
  EXPECT_EQ(run.next_save(parent), kFuture + 2);
  RunIdentity elsewhere;
  EXPECT_LT(elsewhere.next_save(empty_folder("elsewhere")), kFuture);
  EXPECT_EQ(elsewhere.next_save(parent), kFuture + 1) << "the first save into another folder";
}

TEST(RunIdentityTest, TheLastNumberOfAllIsNotExceeded) {
  const std::string parent = empty_folder("last");
  write_checkpoint(parent + "/last", saved_by("other", INT64_MAX));
  RunIdentity run;
  EXPECT_EQ(run.next_save(parent), INT64_MAX);
  EXPECT_EQ(run.next_save(parent), INT64_MAX);
}

TEST(RunIdentityTest, AFolderThatCannotBeListedIsNoError) {
  RunIdentity run;
  EXPECT_GT(run.next_save(::testing::TempDir() + "/none/at/all"), 0);
}

}  // namespace
}  // namespace zero
