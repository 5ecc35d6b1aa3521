// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Sums of micro-batches, in fp32 or where each rank has one micro-batch in its gradient's dtype:
// every rank sends the sums of its nodes of the tree (bookkeeping/sum_tree.h), and the owner of a
// row adds all of them up as the tree does, so that a sum does not depend on the number of ranks.
//
// Packed, a bucket has matrices() matrices [world_size, n], one behind the other; encoded, row r
// has the rows r of all of them. A rank with fewer nodes leaves its last matrices unspecified. Rows
// are bytes to exchanges, which must not add them. In two levels a machine sends the sums of its
// nodes.
#pragma once

#include "bookkeeping/sum_tree.h"
#include "kernels/sum_tree.h"
#include "zero/gradients/wire_format.h"

namespace zero {

class TreeWire final : public WireFormat {
 public:
  // `dtype` is that of gradients: Float, BFloat16 or Half.
  TreeWire(c10::ScalarType dtype, const SumTree& tree, const WirePlace& place = {});

  int64_t bytes(int64_t numel) const override;
  c10::ScalarType packed_dtype() const override { return dtype_; }
  int64_t matrices() const override { return nodes_; }
  bool packs_in_place() const override { return nodes_ == 1; }
  Rows open(const BucketRows& lengths, BufferPool& pool) const override;
  Rows encode(Rows packed, BufferPool& pool) const override;
  void decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                      bool accumulate) const override;
  int64_t sum_numel(int64_t numel) const override { return machine_nodes_ * numel; }
  void sum(const SummandRows& rows, const at::Tensor& sum) const override;
  bool encodes_sums() const override { return false; }
  bool keeps_sums_apart() const override { return true; }
  void encode_sums(const at::Tensor& sums, const at::Tensor& rows) const override;

 private:
  // How the values of some nodes make that of one.
  struct TreeReduction {
    int64_t count = 0;  // nodes
    std::vector<kernels::RowAddition> additions;
    int64_t places = 0;
  };

  static TreeReduction reduction_of(const SumTree& tree, const std::vector<TreeNode>& nodes);
  // The addresses of the values in `rows`: of_row[r] of them in row r, which has `bytes` bytes and
  // room for `room` of them.
  static std::vector<const void*> values_in(const SummandRows& rows,
                                            const std::vector<int64_t>& of_row, int64_t room,
                                            int64_t bytes);
  static void add_up(const TreeReduction& reduction, c10::ArrayRef<const void*> values,
                     c10::ScalarType dtype, const at::Tensor& shard, float scale, bool accumulate);

  const c10::ScalarType dtype_;
  std::vector<int64_t> nodes_of_rank_;
  int64_t nodes_ = 1;  // the most of a rank
  TreeReduction all_ranks_;
  // In two levels.
  std::vector<int64_t> nodes_of_machine_;
  int64_t machine_nodes_ = 1;                // the most of a machine
  std::vector<int64_t> nodes_of_own_ranks_;  // of those on this machine
  std::vector<TreeReduction> own_machine_;   // each node of this machine
  TreeReduction all_machines_;
};

}  // namespace zero
