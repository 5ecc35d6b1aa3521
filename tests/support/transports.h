// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The ways on which the tests of a Communicator let its ranks reach each other.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "tests/support/run_ranks.h"
#include "zero/communicator.h"

namespace zero {

enum class Wire {
  kGloo,
  kShared,  // rows through memory that the ranks share, messages by the default transport
  kMemory,
  kNative,  // kMemory with reduce-scatter and all-gather of its own
};

inline RunOptions on(Wire wire, std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  RunOptions options;
  options.timeout = timeout;
  options.transport = wire == Wire::kGloo     ? Transport::kGloo
                      : wire == Wire::kShared ? kDefaultTransport
                                              : Transport::kMemory;
  options.shared_memory = wire == Wire::kShared;
  options.network = std::make_shared<MemoryNetwork>(
      wire == Wire::kNative ? MemoryNetwork::Kind::kNative : MemoryNetwork::Kind::kPairwise);
  return options;
}

inline std::string wire_name(Wire wire) {
  return wire == Wire::kGloo     ? "Gloo"
         : wire == Wire::kShared ? "Shared"
         : wire == Wire::kMemory ? "Memory"
                                 : "Native";
}

inline std::unique_ptr<Communicator> data_of(const Group& group) {
  return group.make_communicator("data", Purpose::kData);
}

}  // namespace zero
