// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// What ranks send of micro-batches and what owners add up, without ranks: on any number of them,
// the sum over the tree.
#include "zero/gradients/tree_wire.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/flat_model.h"
#include "tests/support/random_tensors.h"
#include "zero/gradients/micro_batch_sums.h"
#include "zero/memory/buffer_pool.h"

namespace zero {
namespace {

// The sum of the leaves from `begin` on, by the definition. An undefined one is zero.
std::optional<at::Tensor> tree_sum(const std::vector<at::Tensor>& leaves, size_t begin,
                                   size_t size) {
  if (begin >= leaves.size()) return std::nullopt;
  if (size == 1) return leaves[begin].to(at::kFloat);
  const auto lower = tree_sum(leaves, begin, size / 2);
  const auto upper = tree_sum(leaves, begin + size / 2, size / 2);
  return upper ? *lower + *upper : lower;
}

at::Tensor tree_sum(const std::vector<at::Tensor>& leaves) { return *tree_sum(leaves, 0, 1024); }

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return at::equal(a.contiguous().view(at::kInt), b.contiguous().view(at::kInt));
}

// Leaves of one parameter of `numel` elements; number 3 has none. Some elements are -0.
std::vector<at::Tensor> make_leaves(int64_t count, int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> leaves;
  for (int64_t i = 0; i < count; ++i) {
    at::Tensor leaf = random_tensor({numel}, 40 + i).to(dtype);
    leaf.slice(0, i % 5, numel, 5).fill_(-0.0);
    leaf.select(0, 0).fill_(-0.0);
    leaves.push_back(i == 3 ? at::zeros({numel}, dtype) : leaf);
  }
  return leaves;
}

// What rank `rank` sends: its micro-batches in a bucket of one parameter, which fills rows of
// `lengths`.
Rows sent(const std::vector<at::Tensor>& leaves, const FlatModel& model, const TreeWire& wire,
          const BucketRows& lengths, int64_t rank, BufferPool& pool) {
  const auto count = static_cast<int64_t>(leaves.size());
  MicroBatchSums sums(model.table, count, rank, lengths.count());
  const Rows packed = wire.open(lengths, pool);
  const at::Tensor matrices = packed.values().view({wire.matrices(), lengths.total()});
  for (int64_t i = sums.begin(); i < sums.end(); ++i) {
    const at::Tensor leaf = i == 3 ? at::Tensor() : leaves[i].clone();
    if (!sums.is_last()) {
      if (leaf.defined()) sums.add(0, leaf);
      sums.end_micro_batch();
      continue;
    }
    const at::Tensor before = leaf.defined() ? leaf.clone() : leaf;
    const auto parts = sums.finish(0, leaf);
    if (leaf.defined()) {
      EXPECT_TRUE(at::equal(leaf, before)) << "a gradient of autograd is only read";
    }
    for (size_t k = 0; k < parts.size(); ++k) {
      at::Tensor sum = parts[k].tensor.defined()
                           ? parts[k].tensor.to(wire.packed_dtype())
                           : at::zeros({lengths.total()}, wire.packed_dtype());
      if (parts[k].added.defined()) sum = sum + parts[k].added;
      matrices[static_cast<int64_t>(k)].copy_(sum);
    }
  }
  return wire.encode(packed, pool);
}

at::Tensor owned(const std::vector<Rows>& all, const TreeWire& wire, int64_t owner, int64_t numel) {
  std::vector<const void*> addresses;
  for (const Rows& rows : all) addresses.push_back(rows.row(owner).const_data_ptr());
  SummandRows summands;
  summands.dtype = all[0].values().scalar_type();
  summands.count = static_cast<int64_t>(all.size());
  summands.addresses = addresses.data();
  const at::Tensor shard = at::empty({numel});
  wire.decode_and_sum(summands, shard, 1.0F, /*accumulate=*/false);
  const at::Tensor thrice = shard.clone();
  wire.decode_and_sum(summands, thrice, 2.0F, /*accumulate=*/true);
  EXPECT_TRUE(same_bits(thrice, shard + 2.0F * shard));
  return shard;
}

TEST(TreeWireTest, OwnersHaveTheSumOverTheTreeOnAnyNumberOfRanks) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t count : {1, 2, 3, 5, 8, 12, 13}) {
      for (int64_t world = 1; world <= count; ++world) {
        for (const bool equal : {true, false}) {
          const int64_t row = 21;
          const int64_t numel = row * world;
          std::vector<int64_t> ends;
          for (int64_t r = 0; r < world; ++r) ends.push_back((r + 1) * row + (r % 2));
          ends.back() = numel;
          const BucketRows lengths = equal ? BucketRows(world, row) : BucketRows(ends);
          const FlatModel model({at::zeros({numel}, dtype)}, world, PlanOptions());
          const std::vector<at::Tensor> leaves = make_leaves(count, numel, dtype);
          const TreeWire wire(dtype, SumTree(count, world));
          EXPECT_EQ(wire.packed_dtype(), count == world ? dtype : at::kFloat);
          BufferPool pool(at::kCPU, 0);
          std::vector<Rows> all;
          for (int64_t r = 0; r < world; ++r) {
            all.push_back(sent(leaves, model, wire, lengths, r, pool));
            EXPECT_EQ(all.back().values().scalar_type(), at::kByte) << "no exchange adds it up";
            EXPECT_EQ(all.back().row(0).numel(), wire.bytes(lengths.numel(0)));
          }
          const at::Tensor expected = tree_sum(leaves);
          for (int64_t r = 0; r < world; ++r) {
            const int64_t own = lengths.numel(r);
            EXPECT_TRUE(
                same_bits(owned(all, wire, r, own), expected.narrow(0, lengths.begin(r), own)))
                << dtype << ": " << count << " on " << world << ", rank " << r;
          }
        }
      }
    }
  }
}

TEST(TreeWireTest, MachinesAddUpTheirNodesFirst) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t count : {4, 6, 8, 12, 13}) {
      for (const int64_t machines : {2, 3}) {
        for (const int64_t local : {2, 3}) {
          const int64_t world = machines * local;
          if (world > count) continue;
          const int64_t row = 21;
          const BucketRows lengths(world, row);
          const FlatModel model({at::zeros({row * world}, dtype)}, world, PlanOptions());
          const std::vector<at::Tensor> leaves = make_leaves(count, row * world, dtype);
          BufferPool pool(at::kCPU, 0);
          // What each machine sends for row 0.
          std::vector<at::Tensor> of_machines;
          std::unique_ptr<TreeWire> wire;
          for (int64_t m = 0; m < machines; ++m) {
            std::vector<const void*> addresses;
            std::vector<Rows> all;
            for (int64_t r = m * local; r < (m + 1) * local; ++r) {
              wire =
                  std::make_unique<TreeWire>(dtype, SumTree(count, world), WirePlace{r, machines});
              all.push_back(sent(leaves, model, *wire, lengths, r, pool));
            }
            for (const Rows& rows : all) addresses.push_back(rows.row(0).const_data_ptr());
            SummandRows summands;
            summands.dtype = at::kByte;
            summands.count = local;
            summands.addresses = addresses.data();
            EXPECT_EQ(wire->sum_numel(row), SumTree(count, machines).most_nodes() * row);
            of_machines.push_back(at::ones({wire->sum_numel(row)}));  // overwritten
            wire->sum(summands, of_machines.back());
          }
          std::vector<const void*> addresses;
          for (const at::Tensor& sums : of_machines) addresses.push_back(sums.const_data_ptr());
          SummandRows summands;
          summands.dtype = at::kByte;
          summands.count = machines;
          summands.addresses = addresses.data();
          const at::Tensor shard = at::empty({row});
          wire->decode_and_sum(summands, shard, 1.0F, /*accumulate=*/false);
          EXPECT_TRUE(same_bits(shard, tree_sum(leaves).narrow(0, 0, row)))
              << dtype << ": " << count << " on " << machines << " machines of " << local;
        }
      }
    }
  }
}

TEST(TreeWireTest, BuffersGoBack) {
  for (const int64_t count : {4, 3}) {  // in one matrix, and in two
    const TreeWire wire(at::kFloat, SumTree(count, 2));
    BufferPool pool(at::kCPU, int64_t{1} << 30);
    int64_t held = 0;
    for (int step = 0; step < 3; ++step) {
      const Rows packed = wire.open({2, 1000}, pool);
      const void* const memory = packed.values().const_data_ptr();
      packed.values().zero_();
      const at::Tensor rows = wire.encode(packed, pool).values();
      EXPECT_EQ(rows.const_data_ptr() == memory, wire.packs_in_place());
      pool.release(rows);
      if (step == 0) held = pool.held_bytes();
      EXPECT_EQ(pool.held_bytes(), held) << count;
    }
  }
}

TEST(TreeWireTest, ARankKeepsFewSums) {
  const FlatModel model({at::zeros({1000})}, 2, PlanOptions());
  MicroBatchSums sums(model.table, 64, 1, 2);
  int64_t most = 0;
  const void* first = nullptr;
  for (int64_t i = 0; i < 31; ++i) {
    const at::Tensor gradient = random_tensor({1000}, i);
    if (i == 0) first = gradient.const_data_ptr();
    sums.add(0, gradient);
    EXPECT_EQ(gradient.use_count(), i % 2 == 0 ? 2U : 1U) << "one that is added up is freed";
    sums.end_micro_batch();
    most = std::max(most, sums.bytes());
  }
  EXPECT_EQ(most, 5 * 4000) << "log2(64 / 2)";
  const auto parts = sums.finish(0, random_tensor({1000}, 31));
  ASSERT_EQ(parts.size(), 1U);
  EXPECT_EQ(parts[0].added.const_data_ptr(), first) << "sums are made in place";
  EXPECT_FALSE(sums.has(0));
  EXPECT_EQ(sums.bytes(), 0);
}

// Steps of 8 micro-batches and 3 parameters. See Note [memory of local sums].
TEST(TreeWireTest, TheMemoryOfTheSumsOfAStepIsHeldUntilTheNextOneTakesIt) {
  for (const int64_t numel : {16 << 10, 8}) {
    const FlatModel model({at::zeros({numel}), at::zeros({numel}), at::zeros({numel})}, 1,
                          PlanOptions());
    MicroBatchSums sums(model.table, 8, 0, 1);
    const int64_t bytes = numel * 4;
    // In each of three places that of all parameters but the first.
    const int64_t held = numel == 8 ? 0 : 3 * 2 * bytes;
    for (int step = 0; step < 3; ++step) {
      for (int64_t i = 0; i < 7; ++i) {
        for (const int64_t p : {2, 0, 1}) sums.add(p, random_tensor({numel}, i));
        sums.end_micro_batch();
        // Micro-batch 1 is added up in the first place, and takes no memory of the second one.
        if (i == 1) {
          EXPECT_EQ(sums.bytes(), 3 * bytes + (step > 0 ? held * 2 / 3 : 0));
        }
      }
      EXPECT_EQ(sums.bytes(), 3 * 3 * bytes) << "the sums alone, in step " << step;
      for (const int64_t p : {2, 0, 1}) sums.finish(p, random_tensor({numel}, 7));
      EXPECT_EQ(sums.bytes(), held) << "step " << step;
      sums.drop_all();
      EXPECT_EQ(sums.bytes(), held) << "step " << step;
    }
    sums.free_recycled();
    EXPECT_EQ(sums.bytes(), 0);
  }
}

TEST(TreeWireTest, WhatTheNextStepDoesNotTakeIsFreedByItsLastMicroBatch) {
  const FlatModel model({at::zeros({16 << 10}), at::zeros({16 << 10})}, 1, PlanOptions());
  MicroBatchSums sums(model.table, 2, 0, 1);
  for (const int64_t p : {0, 1}) sums.add(p, at::zeros({16 << 10}));
  for (const int64_t expected : {64 << 10, 0}) {
    if (sums.done() == 0) sums.end_micro_batch();
    for (const int64_t p : {0, 1}) sums.finish(p, at::zeros({16 << 10}));
    EXPECT_EQ(sums.bytes(), expected);
    sums.drop_all();
  }
}

// As autograd gives views of one gradient to two parameters, and a program keeps one.
TEST(TreeWireTest, GradientsThatShareMemoryAreAddedUpApart) {
  const FlatModel model({at::zeros({8}), at::zeros({8})}, 1, PlanOptions());
  MicroBatchSums sums(model.table, 4, 0, 1);
  std::vector<at::Tensor> leaves, kept;
  for (int64_t i = 0; i < 3; ++i) {
    kept.push_back(random_tensor({8}, i));
    leaves.push_back(kept.back().clone());
    sums.add(0, kept.back().view({8}));
    sums.add(1, kept.back().view({8}));
    sums.end_micro_batch();
  }
  leaves.push_back(random_tensor({8}, 3));
  for (const int64_t parameter : {0, 1}) {
    const auto parts = sums.finish(parameter, leaves.back());
    ASSERT_EQ(parts.size(), 1U);
    const at::Tensor sum =
        parts[0].added.defined() ? parts[0].tensor + parts[0].added : parts[0].tensor;
    EXPECT_TRUE(same_bits(sum, tree_sum(leaves))) << parameter;
  }
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(at::equal(kept[i], leaves[i])) << i;
}

TEST(TreeWireTest, ASecondGradientOfAMicroBatchIsRefused) {
  const FlatModel model({at::zeros({4})}, 1, PlanOptions());
  MicroBatchSums sums(model.table, 4, 0, 1);
  sums.add(0, at::zeros({4}));
  EXPECT_NE(error_of([&] { sums.add(0, at::zeros({4})); }).find("one gradient in micro-batch 0"),
            std::string::npos);
  sums.end_micro_batch();
  sums.add(0, at::zeros({4}));
  sums.drop_all();
  EXPECT_FALSE(sums.has(0));
  EXPECT_EQ(sums.done(), 0);
  sums.add(0, at::zeros({4}));
}

}  // namespace
}  // namespace zero
