// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Ranks as threads of the test, each with a Group of its own. Much faster than processes, and
// sanitizers see all ranks at once.
#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include "tests/support/in_memory_backend.h"
#include "zero/process_group.h"

namespace zero {

enum class Transport {
  kGloo,    // The real one, over 127.0.0.1.
  kMemory,  // MemoryNetwork: faster, injects faults, runs under ThreadSanitizer.
};

// ThreadSanitizer does not see the atomics inside Gloo and libtorch that order its threads.
#if defined(__SANITIZE_THREAD__)
inline constexpr Transport kRealTransport = Transport::kMemory;
#else
inline constexpr Transport kRealTransport = Transport::kGloo;
#endif

// Less than any row of a test, more than what a failed group sends to itself.
inline constexpr int64_t kSharedRowBytes = 2;

// Gloo over 127.0.0.1, and with `shared_memory`, rows of at least kSharedRowBytes through memory
// that ranks share. A rank that is not `willing` does not share its own.
BackendFactory gloo_factory(bool shared_memory, bool willing = true);

struct RunOptions {
  // Gloo takes most of a small run to connect: kRealTransport is for what depends on sockets.
  Transport transport = Transport::kMemory;
  // Rows of at least kSharedRowBytes pass through memory that the ranks share. The threshold of
  // zero::share_memory() is for large models.
  bool shared_memory = false;
  int unwilling = -1;  // the rank that does not share its memory
  // The groups state that so many ranks share a machine; 0: all of them.
  int ranks_per_machine = 0;
  // Of the groups: bounds every wait of a rank for another.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  // For kMemory, to inject faults and to read counts; a network of this run's own by default.
  std::shared_ptr<MemoryNetwork> network = nullptr;
};

// Calls body(group) on `world_size` threads, rank by rank, and returns when all have returned.
// Rethrows what the first failing rank threw. A rank that fails drops its communicators, which
// makes the others fail rather than wait for it; so expectations belong into the body.
void run_ranks(int world_size, const std::function<void(const Group&)>& body,
               const RunOptions& options = {});

// Rank `rank` of a job of any size, alone in this thread: see make_simulated_backend().
Group simulated_group(int world_size, int rank = 0);

}  // namespace zero
