// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "tests/support/run_ranks.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "zero/comm/backends/shared_rows.h"

namespace zero {
namespace {

// A store that refuses once a rank has failed, so that no rank waits at a rendezvous for it.
class RunStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    TORCH_CHECK(!failed, "another rank has failed");
    return HashStore::check(keys);
  }
  std::atomic<bool> failed{false};
};

BackendFactory sharing(BackendFactory under, bool willing) {
  return [under, willing](const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                          Purpose purpose, std::chrono::milliseconds timeout) {
    NewBackend made = under(store, rank, world_size, purpose, timeout);
    if (purpose == Purpose::kData) {
      made.backend = share_memory(made.backend, timeout, willing, kSharedRowBytes);
    }
    return made;
  };
}

}  // namespace

BackendFactory gloo_factory(bool shared_memory, bool willing) {
  BackendFactory sockets =
      default_backend_factory(at::kCPU, "127.0.0.1", false, /*shared_memory=*/false);
  return shared_memory ? sharing(std::move(sockets), willing) : sockets;
}

void run_ranks(int world_size, const std::function<void(const Group&)>& body,
               const RunOptions& options) {
  const auto store = c10::make_intrusive<RunStore>();
  store->setTimeout(options.timeout);
  const auto network = options.network ? options.network : std::make_shared<MemoryNetwork>();
  std::mutex mutex;
  std::exception_ptr first;
  const auto fail = [&] {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!first) first = std::current_exception();
    }
    store->failed = true;
    if (options.transport == Transport::kMemory) network->stop();
  };
  const auto run = [&](int rank) {
    try {
      const bool willing = rank != options.unwilling;
      BackendFactory factory = gloo_factory(options.shared_memory, willing);
      if (options.transport == Transport::kMemory) {
        factory = network->factory(rank);
        if (options.shared_memory) factory = sharing(std::move(factory), willing);
      }
      const int local_ranks =
          options.ranks_per_machine > 0 ? options.ranks_per_machine : world_size;
      body(Group(store, rank, world_size, "test", factory, at::kCPU, options.timeout,
                 Topology::of_equal_machines(world_size, local_ranks)));
    } catch (...) {
      fail();
    }
  };
  // libtorch's flight recorder registers groups without a lock; ranks that are
  // threads of one process would race there.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  std::vector<std::thread> threads;
  try {
    for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(run, rank);
  } catch (...) {  // The system has no thread left. Those ranks that run wait for no other.
    fail();
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

Group simulated_group(int world_size, int rank) {
  const BackendFactory factory = [](const c10::intrusive_ptr<c10d::Store>&, int rank,
                                    int world_size, Purpose, std::chrono::milliseconds) {
    return NewBackend(make_simulated_backend(rank, world_size), RowTransport::kWhole);
  };
  return Group(c10::make_intrusive<c10d::HashStore>(), rank, world_size, "simulated", factory,
               at::kCPU, std::chrono::seconds(30));
}

}  // namespace zero
