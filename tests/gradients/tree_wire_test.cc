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
            of_machines.push_back(at::zeros({wire->sum_numel(row)}));
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

TEST(TreeWireTest, ARankKeepsFewSums) {
  const FlatModel model({at::zeros({1000})}, 2, PlanOptions());
  MicroBatchSums sums(model.table, 64, 1, 2);
  int64_t most = 0;
  for (int64_t i = 0; i < 31; ++i) {
    sums.add(0, random_tensor({1000}, i));
    sums.end_micro_batch();
    most = std::max(most, sums.bytes());
  }
  EXPECT_EQ(most, 5 * 4000) << "log2(64 / 2)";
  EXPECT_EQ(sums.finish(0, random_tensor({1000}, 31)).size(), 1U);
  EXPECT_EQ(sums.bytes(), 0);
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
  sums.forget();
  EXPECT_FALSE(sums.has(0));
  EXPECT_EQ(sums.done(), 0);
  sums.add(0, at::zeros({4}));
}

}  // namespace
}  // namespace zero
