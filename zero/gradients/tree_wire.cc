// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/gradients/tree_wire.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "kernels/cast.h"
#include "zero/memory/device_stream.h"

namespace zero {

TreeWire::TreeReduction TreeWire::reduction_of(const SumTree& tree,
                                               const std::vector<TreeNode>& nodes) {
  TreeReduction result;
  result.count = static_cast<int64_t>(nodes.size());
  for (const TreeAddition& a : tree.additions(nodes)) {
    result.additions.push_back({a.into, a.from, a.place});
    result.places = std::max(result.places, a.place + 1);
  }
  return result;
}

TreeWire::TreeWire(c10::ScalarType dtype, const SumTree& tree, const WirePlace& place)
    : dtype_(tree.count() == tree.parts() ? dtype : at::kFloat) {
  std::vector<TreeNode> of_ranks;
  for (int64_t part = 0; part < tree.parts(); ++part) {
    const std::vector<TreeNode> nodes = tree.nodes(part);
    nodes_of_rank_.push_back(static_cast<int64_t>(nodes.size()));
    of_ranks.insert(of_ranks.end(), nodes.begin(), nodes.end());
  }
  nodes_ = tree.most_nodes();
  all_ranks_ = reduction_of(tree, of_ranks);
  if (place.machines == 1) return;
  const int64_t local = tree.parts() / place.machines;
  const SumTree machines(tree.count(), place.machines);
  std::vector<TreeNode> of_machines;
  for (int64_t m = 0; m < place.machines; ++m) {
    const std::vector<TreeNode> nodes = machines.nodes(m);
    nodes_of_machine_.push_back(static_cast<int64_t>(nodes.size()));
    of_machines.insert(of_machines.end(), nodes.begin(), nodes.end());
  }
  machine_nodes_ = machines.most_nodes();
  all_machines_ = reduction_of(tree, of_machines);
  const int64_t machine = place.rank / local;
  nodes_of_own_ranks_.assign(nodes_of_rank_.begin() + machine * local,
                             nodes_of_rank_.begin() + (machine + 1) * local);
  for (const TreeNode& node : machines.nodes(machine)) {
    std::vector<TreeNode> inside;
    for (const TreeNode& n : of_ranks) {
      if (n.begin >= node.begin && n.begin < node.begin + node.size) inside.push_back(n);
    }
    own_machine_.push_back(reduction_of(tree, inside));
  }
}

int64_t TreeWire::bytes(int64_t numel) const {
  return nodes_ * numel * static_cast<int64_t>(c10::elementSize(dtype_));
}

Rows TreeWire::open(const BucketRows& lengths, BufferPool& pool) const {
  const at::Tensor values = pool.acquire(nodes_ * lengths.total(), dtype_);
  // Rows of different lengths keep the lengths of one matrix.
  if (!lengths.equal()) return {values, lengths};
  return Rows(values.view({nodes_, lengths.count(), lengths.equal_numel()}));
}

Rows TreeWire::encode(Rows packed, BufferPool& pool) const {
  const at::Tensor& values = packed.values();
  const auto size = static_cast<int64_t>(c10::elementSize(dtype_));
  const BucketRows lengths =
      packed.equal() ? BucketRows(values.size(1), values.size(2)) : packed.lengths();
  const BucketRows bytes = lengths.times(nodes_ * size);
  if (nodes_ == 1) return {values.view({-1}).view(at::kByte), bytes};
  Rows encoded(pool.acquire(bytes.total(), at::kByte), bytes);
  std::vector<kernels::CopySpan> copies;
  const auto* from = static_cast<const char*>(values.const_data_ptr());
  auto* to = static_cast<char*>(encoded.values().mutable_data_ptr());
  for (int64_t r = 0; r < lengths.count(); ++r) {
    const int64_t numel = lengths.numel(r);
    for (int64_t node = 0; node < nodes_ && numel > 0; ++node) {
      copies.push_back({from + (node * lengths.total() + lengths.begin(r)) * size, to, numel});
      to += numel * size;
    }
  }
  kernels::cast_copy_spans(copies, dtype_, dtype_, /*with_addends=*/false,
                           current_stream(values.device()));
  pool.release(values);
  return encoded;
}

std::vector<const void*> TreeWire::values_in(const SummandRows& rows,
                                             const std::vector<int64_t>& of_row, int64_t room,
                                             int64_t bytes) {
  TORCH_INTERNAL_ASSERT(rows.count == static_cast<int64_t>(of_row.size()), "unexpected rows");
  std::vector<const void*> values;
  for (int64_t r = 0; r < rows.count; ++r) {
    const auto* row = static_cast<const char*>(rows.row(r, bytes));
    for (int64_t node = 0; node < of_row[r]; ++node) values.push_back(row + node * bytes / room);
  }
  return values;
}

void TreeWire::add_up(const TreeReduction& reduction, c10::ArrayRef<const void*> values,
                      c10::ScalarType dtype, const at::Tensor& shard, float scale,
                      bool accumulate) {
  const int64_t numel = shard.numel();
  kernels::SumTreeArgs args;
  args.rows = values;
  args.additions = reduction.additions;
  args.places = reduction.places;
  args.numel = numel;
  args.dtype = dtype;
  args.scale = scale;
  args.shard = shard.mutable_data_ptr<float>();
  args.accumulate = accumulate;
  const at::Tensor workspace =
      at::empty({shard.is_cpu() ? 0 : (reduction.places + 1) * numel}, shard.options());
  args.workspace = workspace.mutable_data_ptr<float>();
  kernels::sum_tree(args, current_stream(shard.device()));
}

void TreeWire::decode_and_sum(const SummandRows& rows, const at::Tensor& shard, float scale,
                              bool accumulate) const {
  const int64_t numel = shard.numel();
  const bool of_ranks = rows.count == static_cast<int64_t>(nodes_of_rank_.size());
  const auto values =
      of_ranks ? values_in(rows, nodes_of_rank_, nodes_, bytes(numel))
               : values_in(rows, nodes_of_machine_, machine_nodes_, machine_nodes_ * numel * 4);
  add_up(of_ranks ? all_ranks_ : all_machines_, values, of_ranks ? dtype_ : at::kFloat, shard,
         scale, accumulate);
}

void TreeWire::sum(const SummandRows& rows, const at::Tensor& sum) const {
  const int64_t numel = sum.numel() / machine_nodes_;
  const auto values = values_in(rows, nodes_of_own_ranks_, nodes_, bytes(numel));
  const at::Tensor sums = sum.view({machine_nodes_, numel});
  int64_t begin = 0;
  for (size_t node = 0; node < own_machine_.size(); ++node) {
    const int64_t count = own_machine_[node].count;
    add_up(own_machine_[node], c10::ArrayRef<const void*>(values).slice(begin, count), dtype_,
           sums[static_cast<int64_t>(node)], 1.0F, /*accumulate=*/false);
    begin += count;
  }
}

void TreeWire::encode_sums(const at::Tensor& /*sums*/, const at::Tensor& /*rows*/) const {
  TORCH_INTERNAL_ASSERT(false, "sums are sent in fp32");
}

}  // namespace zero
