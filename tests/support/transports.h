// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The ways on which the tests of a Communicator let its ranks reach each other.
#pragma once

#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_ranks.h"
#include "zero/comm/row_communicator.h"

namespace zero {

enum class Wire {
  kGloo,    // PairwiseExchange
  kShared,  // InPlaceExchange: through memory that the ranks share, messages by the default
            // transport
  kMemory,  // PairwiseExchange
  kNative,  // WholeExchange: kMemory with collectives of its own
};

inline RunOptions on(Wire wire, std::chrono::milliseconds timeout = std::chrono::seconds(30),
                     int ranks_per_machine = 0) {
  RunOptions options;
  options.ranks_per_machine = ranks_per_machine;
  options.timeout = timeout;
  options.transport = wire == Wire::kGloo     ? Transport::kGloo
                      : wire == Wire::kShared ? kRealTransport
                                              : Transport::kMemory;
  options.shared_memory = wire == Wire::kShared;
  options.network = std::make_shared<MemoryNetwork>(
      wire == Wire::kNative ? RowTransport::kWhole : RowTransport::kPairwise);
  return options;
}

inline std::string wire_name(Wire wire) {
  return wire == Wire::kGloo     ? "Gloo"
         : wire == Wire::kShared ? "Shared"
         : wire == Wire::kMemory ? "Memory"
                                 : "Native";
}

// Every transport at 1, 2, 3 and 4 ranks of one machine, and at 2 x 2 and 2 x 3 in two levels;
// at 3 x 2 those in memory, and at 5 x 2 all but Gloo.
struct WireCase {
  Wire wire;
  int world_size;
  int ranks_per_machine = 0;  // 0: all

  bool two_level() const { return ranks_per_machine > 0; }
  int machines() const { return two_level() ? world_size / ranks_per_machine : 1; }
};

inline std::vector<WireCase> wire_cases() {
  std::vector<WireCase> all;
  for (const Wire wire : {Wire::kMemory, Wire::kNative, Wire::kGloo, Wire::kShared}) {
    for (int world_size = 1; world_size <= 4; ++world_size) all.push_back({wire, world_size});
    for (const auto& [world_size, local] : {std::pair{4, 2}, {6, 3}}) {
      all.push_back({wire, world_size, local});
    }
    // What sends between threads or processes does not know how many machines there are.
    if (wire == Wire::kMemory || wire == Wire::kNative) all.push_back({wire, 6, 2});
    // So many machines that rows are copied into the order of places.
    if (wire != Wire::kGloo) all.push_back({wire, 10, 2});
  }
  return all;
}

template <typename Info>
std::string wire_case_name(const Info& info) {
  const WireCase& c = info.param;
  return wire_name(c.wire) +
         (c.two_level() ? std::to_string(c.machines()) + "x" + std::to_string(c.ranks_per_machine)
                        : std::to_string(c.world_size));
}

class WireTest : public ::testing::TestWithParam<WireCase> {
 protected:
  void run(const std::function<void(const Group&)>& body,
           std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
    run_ranks(GetParam().world_size, body,
              on(GetParam().wire, timeout, GetParam().ranks_per_machine));
  }
};

inline std::unique_ptr<Communicator> data_of(const Group& group) {
  return group.make_communicator("data", Purpose::kData);
}

// Copies of the rows that a reduction brought, of `n` elements each.
inline std::vector<at::Tensor> copies_of(const SummandRows& rows, int64_t n,
                                         c10::Device device = at::kCPU) {
  const auto options = at::TensorOptions(rows.dtype).device(device);
  const auto bytes = n * static_cast<int64_t>(c10::elementSize(rows.dtype));
  std::vector<at::Tensor> copies;
  for (int64_t i = 0; i < rows.count; ++i) {
    const void* row = rows.addresses != nullptr ? rows.addresses[i]
                      : i == rows.own           ? rows.own_row
                                      : static_cast<const char*>(rows.received) + i * bytes;
    copies.push_back(at::from_blob(const_cast<void*>(row), {n}, options).clone());
  }
  return copies;
}

// Copies of the rows that reduce_rows() brings, in memory that holds NaN before.
inline std::vector<at::Tensor> reduced_rows(Communicator& ranks, const Rows& rows,
                                            const std::string& label) {
  const int64_t bytes = RowCommunicator(ranks).reduction_bytes(rows);
  const c10::Device device = rows.values().device();
  at::Tensor buffer;
  if (bytes > 0) buffer = at::full({bytes}, 0xFF, at::TensorOptions(at::kByte).device(device));
  std::vector<at::Tensor> result;
  const auto use = [&](const SummandRows& summands) {
    result = copies_of(summands, rows.row(ranks.rank()).numel(), device);
  };
  RowCommunicator(ranks).reduce_rows(rows, buffer, use, label).wait();
  return result;
}

}  // namespace zero
