// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// zero/recovery/generations.h: what survivors can put together, and what is freed.
#include "zero/recovery/generations.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/error_of.h"

namespace zero {
namespace {

Generation generation(int64_t recovery, int64_t number, int world_size,
                      const std::vector<int>& files) {
  Generation g;
  g.recovery = recovery;
  g.number = number;
  g.world_size = world_size;
  for (const int file : files) {
    g.files[file].bytes = at::empty({100}, at::TensorOptions().dtype(at::kByte));
  }
  return g;
}

std::string holdings(const std::vector<Generation>& list) {
  Generations generations;
  for (const Generation& g : list) generations.add(g);
  return holdings_text(generations);
}

TEST(GenerationsTest, TheNewestOneOfWhichEveryFileIsThereIsChosen) {
  // Rank 1 of three has died; rank 2 keeps its copy. Of generation 5, rank 2 has nothing.
  const std::string first = holdings({generation(0, 4, 3, {0, 2}), generation(0, 5, 3, {0, 2})});
  const std::string third = holdings({generation(0, 4, 3, {2, 1})});
  Restorable chosen = newest_restorable({first, third});
  EXPECT_EQ(chosen.number, 4);
  EXPECT_EQ(chosen.servers, (std::vector<int>{0, 1, 0}));
  // Now it has.
  const std::string both = holdings({generation(0, 4, 3, {2, 1}), generation(0, 5, 3, {2, 1})});
  chosen = newest_restorable({first, both});
  EXPECT_EQ(chosen.number, 5);
  EXPECT_EQ(chosen.servers, (std::vector<int>{0, 1, 0}));
}

TEST(GenerationsTest, AStepAfterARecoveryIsNewerThanAllBeforeIt) {
  const std::string one = holdings({generation(0, 9, 3, {0, 2}), generation(1, 0, 2, {0, 1})});
  const std::string other = holdings({generation(0, 9, 3, {1, 2})});
  const Restorable chosen = newest_restorable({one, other});
  EXPECT_EQ(chosen.recovery, 1);
  EXPECT_EQ(chosen.number, 0);
  EXPECT_EQ(chosen.servers, (std::vector<int>{0, 0}));
}

TEST(GenerationsTest, ALostShardIsNamed) {
  expect_words(error_of([] {
                 newest_restorable({holdings({generation(0, 3, 4, {0, 3})}),
                                    holdings({generation(0, 3, 4, {3, 2})})});
               }),
               {"the shard of rank 1", "is lost", "its copy"});
  expect_words(error_of([] { newest_restorable({"", ""}); }), {"no step was protected"});
}

TEST(GenerationsTest, TheMemoryOfFreedFilesIsUsedAgain) {
  Generations generations;
  generations.add(generation(0, 0, 2, {0, 1}));
  const void* const first = generations.all()[0]->files.at(0).bytes.const_data_ptr();
  EXPECT_EQ(generations.bytes(), 200);
  generations.keep_newest();
  EXPECT_EQ(generations.all().size(), 1U) << "the newest is never freed";
  generations.add(generation(0, 1, 2, {0, 1}));
  EXPECT_EQ(generations.bytes(), 400);
  generations.keep_newest();
  ASSERT_EQ(generations.all().size(), 1U);
  EXPECT_EQ(generations.all()[0]->number, 1);
  const c10::Device gpu(c10::DeviceType::PrivateUse1, 0);
  EXPECT_NE(generations.allocate(100, gpu).const_data_ptr(), first) << "its pages are not locked";
  EXPECT_EQ(generations.allocate(100, at::kCPU).const_data_ptr(), first);
  EXPECT_EQ(generations.allocate(99, at::kCPU).numel(), 99);
  const auto read = generations.all()[0];
  generations.add(generation(0, 2, 2, {0, 1}));
  generations.keep_newest();
  EXPECT_NE(generations.allocate(100, at::kCPU).const_data_ptr(),
            read->files.at(0).bytes.const_data_ptr());
}

}  // namespace
}  // namespace zero
