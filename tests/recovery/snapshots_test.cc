// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/recovery/snapshots.h: what survivors can put together, and what is freed.
#include "zero/recovery/snapshots.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <locale>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

Snapshot snapshot(int64_t recovery, int64_t number, int world_size, const std::vector<int>& files) {
  Snapshot s;
  s.recovery = recovery;
  s.number = number;
  s.world_size = world_size;
  for (const int file : files) {
    s.files[file].bytes = at::empty({100}, at::TensorOptions().dtype(at::kByte));
  }
  return s;
}

std::string text_of_all(const std::vector<Snapshot>& list) {
  Snapshots snapshots;
  for (const Snapshot& s : list) snapshots.add(s);
  return snapshots_text(snapshots);
}

struct Separators : std::numpunct<char> {
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(SnapshotsTest, ARankOfAnotherLocaleIsUnderstood) {
  const std::locale before =
      std::locale::global(std::locale(std::locale::classic(), new Separators));
  const std::string text = text_of_all({snapshot(0, 123456, 2, {0, 1})});
  std::locale::global(before);
  EXPECT_EQ(newest_complete({text, ""}).number, 123456);
}

TEST(SnapshotsTest, TheNewestOneOfWhichEveryFileIsThereIsChosen) {
  // Rank 1 of three has died; rank 2 keeps its copy. Of snapshot 5, rank 2 has nothing.
  const std::string first = text_of_all({snapshot(0, 4, 3, {0, 2}), snapshot(0, 5, 3, {0, 2})});
  const std::string third = text_of_all({snapshot(0, 4, 3, {2, 1})});
  CompleteSnapshot chosen = newest_complete({first, third});
  EXPECT_EQ(chosen.number, 4);
  EXPECT_EQ(chosen.servers, (std::vector<int>{0, 1, 0}));
  // Now it has.
  const std::string both = text_of_all({snapshot(0, 4, 3, {2, 1}), snapshot(0, 5, 3, {2, 1})});
  chosen = newest_complete({first, both});
  EXPECT_EQ(chosen.number, 5);
  EXPECT_EQ(chosen.servers, (std::vector<int>{0, 1, 0}));
}

TEST(SnapshotsTest, AStepAfterARecoveryIsNewerThanAllBeforeIt) {
  const std::string one = text_of_all({snapshot(0, 9, 3, {0, 2}), snapshot(1, 0, 2, {0, 1})});
  const std::string other = text_of_all({snapshot(0, 9, 3, {1, 2})});
  const CompleteSnapshot chosen = newest_complete({one, other});
  EXPECT_EQ(chosen.recovery, 1);
  EXPECT_EQ(chosen.number, 0);
  EXPECT_EQ(chosen.servers, (std::vector<int>{0, 0}));
}

TEST(SnapshotsTest, ALostShardIsNamed) {
  expect_words(error_of([] {
                 newest_complete({text_of_all({snapshot(0, 3, 4, {0, 3})}),
                                  text_of_all({snapshot(0, 3, 4, {3, 2})})});
               }),
               {"the shard of rank 1", "is lost", "its copy"});
  expect_words(error_of([] { newest_complete({"", ""}); }), {"no step was protected"});
}

TEST(SnapshotsTest, TheMemoryOfFreedFilesIsUsedAgain) {
  Snapshots snapshots;
  snapshots.add(snapshot(0, 0, 2, {0, 1}));
  const void* const first = snapshots.all()[0]->files.at(0).bytes.const_data_ptr();
  EXPECT_EQ(snapshots.bytes(), 200);
  snapshots.keep_newest();
  EXPECT_EQ(snapshots.all().size(), 1U) << "the newest is never freed";
  snapshots.add(snapshot(0, 1, 2, {0, 1}));
  EXPECT_EQ(snapshots.bytes(), 400);
  snapshots.keep_newest();
  ASSERT_EQ(snapshots.all().size(), 1U);
  EXPECT_EQ(snapshots.all()[0]->number, 1);
  const c10::Device gpu(c10::DeviceType::PrivateUse1, 0);
  EXPECT_NE(snapshots.allocate(100, gpu).const_data_ptr(), first) << "its pages are not locked";
  EXPECT_EQ(snapshots.allocate(100, at::kCPU).const_data_ptr(), first);
  EXPECT_EQ(snapshots.allocate(99, at::kCPU).numel(), 99);
  const auto read = snapshots.all()[0];
  snapshots.add(snapshot(0, 2, 2, {0, 1}));
  snapshots.keep_newest();
  EXPECT_NE(snapshots.allocate(100, at::kCPU).const_data_ptr(),
            read->files.at(0).bytes.const_data_ptr());
}

}  // namespace
}  // namespace zero
