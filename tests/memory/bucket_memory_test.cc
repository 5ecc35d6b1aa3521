// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/memory/bucket_memory.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <string>

#include "bookkeeping/layout.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"

namespace zero {
namespace {

Plan plan_of(Layout layout) {
  return make_plan({{40, at::kFloat, 0}, {33, at::kFloat, 0}}, {3}, {layout, 0});
}

TEST(BucketMemoryTest, InPlaceRowsAreTheMemoryOfThePlaces) {
  const Plan plan = plan_of(Layout::kContiguous);
  BufferPool pool(at::kCPU, 0);
  BucketMemory memory(plan, pool);
  memory.allocate();
  memory.rows(0).values().copy_(
      at::arange(plan.bucket_numel(plan.buckets[0]), at::kFloat).view({3, -1}));
  // Parameter 1 is first, and parameter 0 follows at the next unit.
  EXPECT_TRUE(memory.place(1, {33}, {1}).equal(at::arange(33, at::kFloat)));
  EXPECT_TRUE(memory.place(0, {40}, {1}).equal(at::arange(48, 88, at::kFloat)));
  EXPECT_EQ(memory.bytes(), 4 * plan.arenas[0].numel);
  memory.publish(0, memory.rows(0), [](int64_t) -> at::Tensor {
    ADD_FAILURE() << "nothing is to be copied";
    return {};
  });
  EXPECT_EQ(pool.held_bytes(), 0);
}

TEST(BucketMemoryTest, OtherRowsAreABufferUntilTheyArePublished) {
  const Plan plan = plan_of(Layout::kPerParameter);
  BufferPool pool(at::kCPU, 0);
  BucketMemory memory(plan, pool);
  memory.allocate();
  EXPECT_FALSE(memory.flat()[0].defined());
  EXPECT_FALSE(memory.place(0, {40}, {1}).defined());
  const Rows bucket = memory.rows(0);
  const at::Tensor& rows = bucket.values();
  const at::Tensor from = at::arange(40, at::kFloat), to = at::zeros({40});
  for (const Slot& slot : plan.buckets[0].slots) {
    if (slot.parameter == 0) copy_into_bucket(plan, plan.buckets[0], slot, from, rows);
  }
  memory.publish(0, bucket, [&](int64_t p) { return p == 0 ? to : at::Tensor(); });
  EXPECT_TRUE(to.equal(from));
}

TEST(BucketMemoryTest, RowsOfDifferentLengthsAreOneAfterTheOther) {
  for (const Layout layout : {Layout::kContiguous, Layout::kPerParameter}) {
    Plan plan = plan_of(layout);
    const int64_t total = plan.bucket_numel(plan.buckets[0]);
    plan.buckets[0].rows = BucketRows({16, 32, total});
    BufferPool pool(at::kCPU, 0);
    BucketMemory memory(plan, pool);
    memory.allocate();
    const Rows rows = memory.rows(0);
    EXPECT_EQ(rows.values().sizes(), at::IntArrayRef({total}));
    const auto* begin = static_cast<const float*>(rows.values().const_data_ptr());
    EXPECT_EQ(rows.row(0).numel(), 16);
    EXPECT_EQ(rows.row(1).const_data_ptr(), begin + 16);
    EXPECT_EQ(rows.row(2).numel(), total - 32);
  }
}

TEST(BucketMemoryTest, CopiesCastAndAddAndClear) {
  FlatModel flat({at::zeros({9})}, 1, {Layout::kContiguous, 256});
  const Bucket& bucket = flat.plan.buckets[0];
  const at::Tensor source = random_tensor({9}, 1), added = random_tensor({9}, 2).to(at::kBFloat16);
  const at::Tensor rows = at::full({1, flat.row_numel(0)}, 5.0, at::kBFloat16);
  const auto got = [&] { return rows[0].narrow(0, 0, 9); };
  copy_into_bucket(flat.plan, bucket, bucket.slots[0], source, rows);
  EXPECT_TRUE(at::equal(got(), source.to(at::kBFloat16)));
  copy_into_bucket(flat.plan, bucket, bucket.slots[0], source, rows, added);
  EXPECT_TRUE(at::equal(got(), (source + added.to(at::kFloat)).to(at::kBFloat16)));
  copy_into_bucket(flat.plan, bucket, bucket.slots[0], at::Tensor(), rows);
  EXPECT_TRUE(at::equal(got(), at::zeros({9}, at::kBFloat16)));
  // Padding is left as it is.
  EXPECT_TRUE(at::all(rows[0].narrow(0, 9, flat.row_numel(0) - 9) == 5).item<bool>());
}

}  // namespace
}  // namespace zero
