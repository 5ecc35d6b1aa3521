// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How the ranks of a job find each other: the environment, the store, the topology.
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "zero/base/descriptors.h"
#include "zero/base/error_text.h"
#include "zero/base/slow_wait.h"
#include "zero/comm/backends/nccl.h"
#include "zero/comm/find_topology.h"
#include "zero/process_group.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/environment.h"
#include "zero/rendezvous/meeting.h"
#include "zero/rendezvous/tcp_store.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

c10::Device default_device(const Environment& env) {
  const int devices = cuda_device_count();
  if (devices == 0) return at::kCPU;
  // Schedulers may show each rank only its own GPU, which then is number 0.
  const int index = devices == 1 ? 0 : env.local_rank;
  TORCH_CHECK(index < devices, "init_process_group: rank ", env.rank, " has local rank ",
              env.local_rank, " and sees ", devices, " GPUs: start at most ", devices,
              " ranks on this machine, or set InitOptions::device");
  return c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
}

// Empty: Gloo looks at GLOO_SOCKET_IFNAME or resolves this machine's name.
std::string default_hostname(const Environment& env) {
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  const bool named = interfaces != nullptr && *interfaces != '\0';
  return !named && env.local_world_size == env.world_size ? "127.0.0.1" : "";
}

std::string address_of(const Environment& env) {
  return c10::str(env.master_addr, ":", env.master_port);
}

c10::intrusive_ptr<BoundedStore> open_store(const Environment& env, milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = !env.agent_serves_store && env.rank == 0;
  options.numWorkers = static_cast<size_t>(env.world_size);
  options.waitWorkers = false;  // meet() waits, and can say who is missing.
  options.timeout = timeout;
  options.multiTenant = true;  // A second init_process_group() shares the server.
  const char* server = env.agent_serves_store ? "the launcher" : "rank 0";
  const SlowWait notice([&] {
    return c10::str("rank ", env.rank, " of ", env.world_size, " waits for the store of ", server,
                    " at ", address_of(env), " (up to ", duration_text(timeout), ")");
  });
  try {
    if (options.isServer) {
      const std::string problem = make_room_for_descriptors(store_descriptors(env.world_size));
      TORCH_CHECK(problem.empty(), problem);
    }
    return c10::make_intrusive<BoundedStore>(
        open_tcp_store(env.master_addr, options), timeout,
        c10::str("the store of ", server, " at ", address_of(env)), options.isServer);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "init_process_group: rank ", env.rank, " of ", env.world_size, " cannot ",
                options.isServer ? "serve" : "reach", " the store of ", server, " at ",
                address_of(env), " (MASTER_ADDR, MASTER_PORT) within ", timeout.count(),
                " ms: ", error_line(error),
                options.isServer ? ". Is the port taken by another job? Choose another MASTER_PORT"
                                 : c10::str(". Is ", server,
                                            " running, can this machine reach it, and does no "
                                            "other program use the port?"));
  }
}

std::vector<int> all_ranks(const Environment& env) {
  std::vector<int> ranks(static_cast<size_t>(env.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// The counter lets a job of thousands wait for one key instead of one per rank.
void meet(const c10::intrusive_ptr<BoundedStore>& store, const Environment& env,
          milliseconds timeout, std::chrono::steady_clock::time_point since) {
  Rendezvous rendezvous(store, env.rank, env.world_size, timeout, since,
                        c10::str("init_process_group: not all ", env.world_size, " ranks arrived"),
                        c10::str("at ", address_of(env)), all_ranks(env));
  rendezvous.run([rank = env.rank, size = env.world_size](const StorePtr& own) {
    // Before it is counted, since ranks of two jobs would train together.
    TORCH_CHECK_VALUE(own->add(c10::str("came/", rank), 1) == 1, "expected one process with RANK ",
                      rank,
                      ", got two; give each process a RANK of its own, and each job on this "
                      "machine a MASTER_PORT of its own");
    if (own->add("arrivals", 1) == size) own->set("complete", std::string("1"));
    own->wait({"complete"});
  });
}

Group init(const InitOptions& options) {
  static std::atomic<int> groups{0};
  const Environment env = read_environment();
  const c10::Device device = options.device ? *options.device : default_device(env);
  TORCH_CHECK(!device.is_cuda() || cuda_device_count() > 0, "InitOptions::device: got ", device,
              " on rank ", env.rank, ", but this program sees no GPU. A program for GPUs is built ",
              "with --config=cuda (Bazel) or -DZERO_CUDA=ON (CMake)");
  const std::string hostname = options.hostname.empty() ? default_hostname(env) : options.hostname;
  const milliseconds timeout =
      options.timeout.value_or(env.timeout.value_or(InitOptions::kDefaultTimeout));
  TORCH_CHECK(timeout.count() > 0, "InitOptions::timeout: expected more than 0 ms, got ",
              timeout.count(), " ms on rank ", env.rank);
  std::optional<Topology> topology = options.topology;
  TORCH_CHECK(!env.joins || !topology,
              "InitOptions::topology: expected none on a rank that joins a job, got one on rank ",
              env.rank);
  TORCH_CHECK(!topology || topology->world_size() == env.world_size,
              "InitOptions::topology: expected one of ", env.world_size, " ranks, got one of ",
              topology->world_size(), " on rank ", env.rank);
  StorePtr store;
  Joining joining{env.joins};
  if (env.world_size == 1) {
    store = c10::make_intrusive<c10d::HashStore>();
  } else {
    const auto start = std::chrono::steady_clock::now();
    // Of groups, not of calls: one that failed on this rank alone must not count.
    Tries tries(open_store(env, timeout)->under(c10::str("zero/", env.restart_count, "/", groups)));
    const auto bounded = tries.enter(env.rank, start + timeout);
    // A rank that joins knows no topology that was stated: each is then on a machine of its own.
    joining.find_topology = [timeout, willing = options.shared_memory && !options.topology](
                                const StorePtr& own, int rank, int world_size) {
      return agree_on_topology(BoundedStore::of(own, timeout), rank, world_size, timeout,
                               std::chrono::steady_clock::now(), std::nullopt, willing);
    };
    try {
      if (!env.joins) {
        meet(bounded->under("meeting"), env, timeout, start);
        topology = agree_on_topology(bounded->under("topology"), env.rank, env.world_size, timeout,
                                     start, topology, options.shared_memory, all_ranks(env));
      }
    } catch (...) {
      tries.give_up();
      throw;
    }
    const std::string text = topology ? advice(*topology) : std::string();
    if (env.rank == 0 && !text.empty()) TORCH_WARN("init_process_group: ", text);
    ++groups;
    store = bounded;
  }
  return Group(store, env.rank, env.world_size, "world",
               default_backend_factory(device, hostname, options.nccl, options.shared_memory),
               device, timeout, topology, joining);
}

}  // namespace

Group init_process_group(const InitOptions& options) {
  return with_c10_errors("init_process_group", [&] { return init(options); });
}

}  // namespace zero
