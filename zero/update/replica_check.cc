// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/update/replica_check.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>
#include <map>
#include <sstream>

#include "kernels/cast.h"

namespace zero {
namespace {

// The values in the memory order that they have on every rank. set_data() may have given another
// one.
at::Tensor in_order(const Parameter& parameter) {
  const at::Tensor tensor = parameter.tensor.detach();
  if (is_in_order(parameter)) return tensor;
  return at::empty_strided(tensor.sizes(), parameter.strides, tensor.options()).copy_(tensor);
}

// 62 bits, so that the value and its negative are both int64.
int64_t hash_of(const Parameter& parameter) {
  const at::Tensor host = in_order(parameter).cpu();
  return static_cast<int64_t>(XXH3_64bits(host.const_data_ptr(), host.nbytes()) >> 2);
}

// Returns whether this rank's masters of a parameter round to its working values.
bool masters_agree(const ParameterTable& table, const ShardOptimizer& shards,
                   const SegmentTensors& s) {
  if (shards.masters().is_split(s.segment.bucket)) return true;  // its working values are halves
  const at::Tensor tensor = in_order(table.parameters()[s.segment.parameter]);
  // Only the segment: a parameter may have many.
  const at::Tensor working =
      tensor.as_strided({s.segment.numel}, {1}, tensor.storage_offset() + s.segment.begin).cpu();
  const at::Tensor master = s.master.cpu();
  at::Tensor rounded = at::empty({s.segment.numel}, working.options());
  kernels::cast_copy(master.const_data_ptr(), at::kFloat, rounded.mutable_data_ptr(),
                     working.scalar_type(), s.segment.numel, nullptr, {});
  return std::memcmp(working.const_data_ptr(), rounded.const_data_ptr(), rounded.nbytes()) == 0;
}

std::string ranks_by_hash(Communicator& group, int64_t hash) {
  const auto texts = group.all_gather_text(std::to_string(hash), "hashes of one parameter");
  std::map<std::string, std::string> ranks;
  for (size_t r = 0; r < texts.size(); ++r) ranks[texts[r]] += c10::str(" ", r);
  std::ostringstream text;
  for (const auto& [value, list] : ranks) text << "\n  ranks" << list << " hold hash " << value;
  return text.str();
}

}  // namespace

void check_working_parameters(const ParameterTable& table, const ShardOptimizer& shards, int rank,
                              Communicator& group, const std::function<bool(int64_t)>& includes) {
  const int64_t count = std::ssize(table.parameters());
  // Per parameter: hash, its negative, and the first rank whose master differs.
  at::Tensor message = at::empty({count, 3}, at::TensorOptions().dtype(at::kLong));
  auto* words = message.mutable_data_ptr<int64_t>();
  std::vector<int64_t> hashes(count);
  for (int64_t p = 0; p < count; ++p) {
    hashes[p] = includes(p) ? hash_of(table.parameters()[p]) : 0;
    words[3 * p] = hashes[p];
    words[3 * p + 1] = -hashes[p];
    words[3 * p + 2] = 0;
  }
  for (const SegmentTensors& s : shards.segments()) {
    if (!includes(s.segment.parameter)) continue;
    if (!masters_agree(table, shards, s)) words[3 * s.segment.parameter + 2] = rank + 1;
  }
  group.all_reduce_max(message.view({-1}), "hashes of all parameters").wait();
  for (int64_t p = 0; p < count; ++p) {
    const std::string& name = table.parameters()[p].name;
    if (words[3 * p] != -words[3 * p + 1]) {
      TORCH_CHECK(false, "rank ", rank, ": parameter ", name,
                  ": expected the same values on every rank, got different ones:",
                  ranks_by_hash(group, hashes[p]),
                  "\ncall refresh_master_parameters() to take rank 0's values, or load a "
                  "checkpoint");
    }
    TORCH_CHECK(words[3 * p + 2] == 0, "rank ", rank, ": parameter ", name,
                ": expected working values that are the rounded masters, got others on rank ",
                words[3 * p + 2] - 1,
                "; call refresh_master_parameters() or refresh_working_parameters()");
  }
}

}  // namespace zero
