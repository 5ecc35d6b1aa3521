// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// How the ranks of a job find each other: the environment, the store, the topology.
#include <c10/util/Exception.h>
#include <limits.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "zero/base/descriptors.h"
#include "zero/base/error_text.h"
#include "zero/base/plain_text.h"
#include "zero/base/slow_wait.h"
#include "zero/comm/backends/nccl.h"
#include "zero/comm/find_topology.h"
#include "zero/process_group.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/environment.h"
#include "zero/rendezvous/job.h"
#include "zero/rendezvous/rendezvous.h"
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

const char* server_of(const Environment& env) {
  return env.agent_serves_store ? "the launcher" : "rank 0";
}

std::string store_name(const Environment& env) {
  return c10::str("the store of ", server_of(env), " at ", address_of(env));
}

// The server of `store` ends with this process: other ranks may have come to it for the next group
// when the last of this rank ends.
void keep_server(const c10::intrusive_ptr<c10d::TCPStore>& store) {
  static std::mutex mutex;
  // By port. Never destroyed: at its exit a forked child would end the server of its parent.
  static auto& servers = *new std::map<uint16_t, StorePtr>;
  const std::lock_guard<std::mutex> lock(mutex);
  servers.emplace(store->getPort(), store);
}

c10::intrusive_ptr<BoundedStore> open_store(const Environment& env, milliseconds timeout,
                                            bool serves) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(env.master_port);
  options.isServer = serves;
  options.numWorkers = static_cast<size_t>(env.world_size);
  options.waitWorkers = false;  // meet() waits, and can say who is missing.
  options.timeout = timeout;
  options.multiTenant = true;  // A second init_process_group() shares the server.
  const auto store = open_tcp_store(env.master_addr, options);
  if (serves) keep_server(store);
  return c10::make_intrusive<BoundedStore>(store, timeout, store_name(env), serves);
}

std::vector<int> all_ranks(const Environment& env) {
  std::vector<int> ranks(static_cast<size_t>(env.world_size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

// `store` for calls that end with the timeout, which counts from `since`.
c10::intrusive_ptr<BoundedStore> in_time(const BoundedStore& store, milliseconds timeout,
                                         std::chrono::steady_clock::time_point since) {
  constexpr milliseconds kAtLeast{100};
  const auto left =
      std::chrono::ceil<milliseconds>(since + timeout - std::chrono::steady_clock::now());
  return store.within(std::max(left, kAtLeast));
}

constexpr const char* kComplete = "complete";

// The name of this process, and a line that no other process has: containers may have one name, and
// count their processes alike.
std::string own_process() {
  static const uint32_t only_here = std::random_device()();
  std::array<char, HOST_NAME_MAX + 1> host{};
  gethostname(host.data(), host.size() - 1);
  return plain_text("process ", getpid(), " on ", host.data(), "\n", only_here);
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Two processes have come with this rank's number: `other` and this one.
std::string two_processes(const Environment& env, const std::string& other) {
  return c10::str("expected one process with RANK ", env.rank, ", got two: ", other, " and ",
                  first_line(own_process()),
                  "; give each process a RANK of its own, and each job a MASTER_PORT of its own");
}

// Throws c10::ValueError where another process has come with this rank's number. That process may
// be of this job or of another one.
void come_once(c10d::Store& store, const Environment& env) {
  const std::string own = own_process();
  const std::string first = claim(store, plain_text("came/", env.rank), own);
  TORCH_CHECK_VALUE(first == own, two_processes(env, first_line(first)),
                    store.check({kComplete})
                        ? c10::str(". All ", env.world_size,
                                   " ranks of the job there had met before: if two jobs were "
                                   "started at one time, it may have ranks of both; end it then")
                        : "");
}

// The counter lets a job of thousands wait for one key instead of one per rank. `other` is a
// process that is known to have this rank's number, too, and may not have come yet.
void meet(const c10::intrusive_ptr<BoundedStore>& store, const Environment& env,
          milliseconds timeout, std::chrono::steady_clock::time_point since,
          const std::string& other = {}) {
  // A job that is complete goes on, whoever comes.
  if (store->check({kComplete})) come_once(*store, env);
  Rendezvous rendezvous(store, env.rank, env.world_size, timeout, since,
                        c10::str("init_process_group: not all ", env.world_size, " ranks arrived"),
                        c10::str("at ", address_of(env)), all_ranks(env));
  rendezvous.run([env, other](const StorePtr& own) {
    // Before it is counted, since ranks of two jobs would train together.
    come_once(*own, env);
    TORCH_CHECK_VALUE(other.empty(), two_processes(env, other));
    if (own->add("arrivals", 1) == env.world_size) own->set(kComplete, std::string("1"));
    own->wait({kComplete});
  });
}

// Where the groups of a round begin, one after the other.
std::string prefix_of(int64_t round, int groups) {
  return plain_text(prefix_of_restart_round(round), "/", groups);
}

// Rank 0 comes to the store that has its port as any other process would. If another job of that
// size is meeting there, without an identifier, a second rank 0 is all that shows that there are
// two jobs: ranks of this one may be at its meeting, which ends now unless it is complete. This
// process waits for none of them: the first rank 0 finds its name, sooner or later. Returns what
// there is to say about it.
std::string meet_other_job(const Environment& env, milliseconds timeout) {
  // A job that starts on a busy machine answers late.
  constexpr milliseconds kAtMost{10000};
  const milliseconds limit = std::min(timeout, kAtMost);
  const auto start = std::chrono::steady_clock::now();
  try {
    const auto store = in_time(*open_store(env, limit, /*serves=*/false), limit, start);
    check_job(*store->under(prefix_of_restart_round(0)), env, store_name(env));
    constexpr int kOtherThan0 = 1;  // it begins no try
    Tries tries(store->under(prefix_of(0, 0)));
    meet(tries.enter(kOtherThan0, start)->under(Tries::kMeeting), env, limit, start,
         c10::str("that of ", store_name(env)));
  } catch (const c10::DistError&) {  // Another program has the port, or the job is silent.
  } catch (const std::exception& error) {
    return error_line(error) + ". ";
  }
  return {};
}

// Returns what rank 0, which serves the store, can do about `error`.
std::string advice_to_server(const Environment& env, milliseconds timeout,
                             const std::exception& error) {
  const auto has = [text = error_text(error)](const char* words) {
    return text.find(words) != std::string::npos;
  };
  // c10d says so of a port that it cannot have. Otherwise it is the client of this process that
  // does not reach the server beside it.
  if (has("server socket")) {
    return c10::str(meet_other_job(env, timeout), "Is the port taken by another job? ",
                    "Choose another MASTER_PORT");
  }
  if (dynamic_cast<const c10::DistError*>(&error) == nullptr && !has("what listens at")) return {};
  return c10::str("Rank 0 is ", first_line(own_process()),
                  ", to which this address does not lead: set MASTER_ADDR to a name or address of "
                  "the machine of rank 0 that all ranks reach, rank 0 too (with mpirun: -x "
                  "MASTER_ADDR=host)");
}

c10::intrusive_ptr<BoundedStore> find_store(const Environment& env, milliseconds timeout) {
  const auto start = std::chrono::steady_clock::now();
  const bool serves = !env.agent_serves_store && env.rank == 0;
  if (serves) {
    const std::string problem = make_room_for_descriptors(store_descriptors(env.world_size));
    TORCH_CHECK(problem.empty(), "init_process_group: rank ", env.rank, " of ", env.world_size,
                " cannot serve ", store_name(env), ": ", problem);
  }
  const SlowWait notice([&] {
    return c10::str("rank ", env.rank, " of ", env.world_size, " waits for ", store_name(env),
                    " (up to ", duration_text(timeout), ")");
  });
  try {
    return open_store(env, timeout, serves);
  } catch (const std::exception& error) {
    const auto took =
        std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - start);
    TORCH_CHECK(false, "init_process_group: rank ", env.rank, " of ", env.world_size, " cannot ",
                serves ? "serve " : "reach ", store_name(env),
                " (MASTER_ADDR, MASTER_PORT) (after ", took.count(), " ms of at most ",
                timeout.count(), " ms): ", error_line(error), ". ",
                serves ? advice_to_server(env, timeout, error)
                       : c10::str("Is ", server_of(env),
                                  " running, can this machine reach it, and does no other program "
                                  "use the port?"));
  }
}

// Returns the store of the next group, after all ranks have met there and found their `topology`,
// of which each may state one. A process that joins makes the groups of the job again, one with
// each call, and waits for no rank here: those have met.
c10::intrusive_ptr<BoundedStore> meet_all(const c10::intrusive_ptr<BoundedStore>& whole,
                                          const Environment& env, const InitOptions& options,
                                          milliseconds timeout,
                                          std::chrono::steady_clock::time_point since,
                                          std::optional<Topology>& topology) {
  // Of groups, not of calls: one that failed on this rank alone must not count.
  static std::atomic<int> groups{0};
  static std::atomic<int64_t> round{0};  // that this process takes part in
  const std::string who = c10::str("init_process_group: rank ", env.rank, " of ", env.world_size);
  const bool rounds = asking_as(who, [&] { return has_restart_rounds(*whole, env); });
  while (true) {
    std::optional<Tries> tries;
    const auto store = asking_as(who, [&] {
      if (rounds && groups == 0 && (round == 0 || is_over(*whole, round))) {
        round = enter_restart_round(*whole, env, own_process(), round, since + timeout);
      }
      check_job(*whole->under(prefix_of_restart_round(round)), env, store_name(env));
      // The others may have made a group, or tried to, without this rank.
      while (!env.joins && Tries::begun(*whole->under(prefix_of(round, groups + 1)))) ++groups;
      return tries.emplace(whole->under(prefix_of(round, groups)))
          .enter(env.rank, since + timeout, env.joins);
    });
    try {
      if (!env.joins) {
        meet(store->under(Tries::kMeeting), env, timeout, since);
        topology = agree_on_topology(store->under("topology"), env.rank, env.world_size, timeout,
                                     since, topology, options.shared_memory, all_ranks(env));
      }
      ++groups;
      return store;
    } catch (...) {
      tries->give_up();
      // This process may have come before rank 0 has begun its round, and waited in an earlier one.
      if (!rounds || env.rank == 0 || groups > 0 || !is_over(*whole, round)) throw;
    }
  }
}

Group init(const InitOptions& options) {
  const Environment env = read_environment();
  c10::Device device = options.device ? *options.device : default_device(env);
  TORCH_CHECK(!device.is_cuda() || cuda_device_count() > 0, "InitOptions::device: got ", device,
              " on rank ", env.rank, ", but this program sees no GPU. A program for GPUs is built ",
              "with --config=cuda (Bazel) or -DZERO_CUDA=ON (CMake)");
  if (device.is_cuda() && !device.has_index()) device = default_device(env);
  TORCH_CHECK(!device.is_cuda() || device.index() < cuda_device_count(),
              "InitOptions::device: expected one of the ", cuda_device_count(),
              " GPUs that this program sees, got ", device, " on rank ", env.rank);
  const std::string hostname = options.hostname.empty() ? default_hostname(env) : options.hostname;
  const milliseconds timeout =
      options.timeout.value_or(env.timeout.value_or(InitOptions::kDefaultTimeout));
  TORCH_CHECK(timeout.count() > 0 && timeout <= kLongestTimeout,
              "InitOptions::timeout: expected more than 0 ms and at most a year, got ",
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
    const auto whole = in_time(*find_store(env, timeout), timeout, start);
    const auto place = meet_all(whole, env, options, timeout, start, topology);
    // A rank that joins knows no topology that was stated: each is then on a machine of its own.
    joining.find_topology = [timeout, willing = options.shared_memory && !options.topology](
                                const StorePtr& own, int rank, int world_size) {
      return agree_on_topology(BoundedStore::of(own, timeout), rank, world_size, timeout,
                               std::chrono::steady_clock::now(), std::nullopt, willing);
    };
    const int sharing = options.shared_memory && !options.topology ? env.local_world_size : 0;
    const bool over_nccl = device.is_cuda() && options.nccl;
    const std::string text = topology ? advice(*topology, sharing, over_nccl) : std::string();
    if (env.rank == 0 && !text.empty()) TORCH_WARN("init_process_group: ", text);
    store = place->each_within(timeout);
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
