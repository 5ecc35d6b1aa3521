// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/comm/find_topology.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "zero/comm/backends/shared_memory.h"
#include "zero/rendezvous/rendezvous.h"

namespace zero {
namespace {

using Bytes = std::vector<uint8_t>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr const char* kTable = "machines";
constexpr const char* kFinal = "final";

// The meeting of the ranks has its own keys in the same store: zero/rendezvous/rendezvous.cc.
std::string key_of(int rank) { return "member/" + std::to_string(rank); }
std::string refused_key(int machine) { return "refused/" + std::to_string(machine); }

// What a rank states, or the memory that it shares: the first byte says which.
enum Kind : uint8_t { kNothing, kMemory, kStated };

Bytes as_bytes(Kind kind, const void* data, size_t size) {
  Bytes bytes(1 + size);
  bytes[0] = kind;
  std::memcpy(bytes.data() + 1, data, size);
  return bytes;
}

Bytes as_bytes(const Topology& topology) {
  std::vector<int32_t> machines;
  for (int r = 0; r < topology.world_size(); ++r) machines.push_back(topology.machine_of(r));
  return as_bytes(kStated, machines.data(), machines.size() * sizeof(int32_t));
}

Topology as_topology(const Bytes& bytes) {
  std::vector<int32_t> machines((bytes.size() - 1) / sizeof(int32_t));
  std::memcpy(machines.data(), bytes.data() + 1, machines.size() * sizeof(int32_t));
  return Topology(std::vector<int>(machines.begin(), machines.end()));
}

// Where the numbers of processes mean the same: the kernel and the PID namespace. Users do not read
// each other's memory.
struct Neighbourhood {
  std::array<char, 40> kernel{};
  std::array<char, 40> processes{};
  int64_t user = 0;
  auto operator<=>(const Neighbourhood&) const = default;
};

struct Member {
  Neighbourhood place;
  SharedMemoryAddress memory;
};

Bytes own_member(const SharedMemory* memory) {
  if (memory == nullptr) return {kNothing};
  Member own;
  own.memory = memory->address();
  own.place.kernel = own.memory.machine;
  own.place.user = geteuid();
  const auto length =
      readlink("/proc/self/ns/pid", own.place.processes.data(), own.place.processes.size() - 1);
  if (length <= 0) return {kNothing};
  return as_bytes(kMemory, &own, sizeof(own));
}

std::optional<Member> as_member(const Bytes& bytes) {
  if (bytes.at(0) != kMemory) return std::nullopt;
  Member member;
  std::memcpy(&member, bytes.data() + 1, sizeof(member));
  return member;
}

// Makes one list from what every rank has set: of those that seem to share a machine, or, with
// `stated`, after a check that all state the same.
Bytes make_table(c10d::Store& store, int world_size) {
  std::vector<std::string> keys;
  for (int r = 0; r < world_size; ++r) keys.push_back(key_of(r));
  const std::vector<Bytes> all = store.multiGet(keys);
  const auto stated = [](const Bytes& bytes) { return bytes.at(0) == kStated; };
  if (std::any_of(all.begin(), all.end(), stated)) {
    for (int r = 1; r < world_size; ++r) {
      TORCH_CHECK_VALUE(all[r] == all[0], "expected the same topology on every rank, got ",
                        stated(all[0]) ? as_topology(all[0]).describe() : "none", " on rank 0 and ",
                        stated(all[r]) ? as_topology(all[r]).describe() : "none", " on rank ", r,
                        "; set InitOptions::topology to the same on all ranks, or on none");
    }
    return all[0];
  }
  std::map<Neighbourhood, int> first;
  std::vector<int> machines;
  for (int r = 0; r < world_size; ++r) {
    const auto member = as_member(all[r]);
    machines.push_back(member ? first.try_emplace(member->place, r).first->second : r);
  }
  return as_bytes(Topology(machines));
}

// Returns whether this rank can read the memory of all others that seem to be on its machine.
bool reads_neighbours(c10d::Store& store, const Topology& table, int rank) {
  std::vector<std::string> keys;
  for (int r = 0; r < table.world_size(); ++r) {
    if (r != rank && table.machine_of(r) == table.machine_of(rank)) keys.push_back(key_of(r));
  }
  if (keys.empty()) return true;
  const std::vector<Bytes> members = store.multiGet(keys);
  return std::all_of(members.begin(), members.end(), [](const Bytes& bytes) {
    return PeerMemory::open(as_member(bytes)->memory) != nullptr;
  });
}

// The ranks of machines that some rank refused are alone.
Bytes without_refused(c10d::Store& store, const Topology& table) {
  std::vector<int> machines;
  std::vector<bool> refused;
  for (int m = 0; m < table.machines(); ++m) refused.push_back(store.check({refused_key(m)}));
  for (int r = 0; r < table.world_size(); ++r) {
    const int machine = table.machine_of(r);
    machines.push_back(refused[machine] ? table.machines() + r : machine);
  }
  return as_bytes(Topology(machines));
}

Topology agree(c10d::Store& store, int rank, int world_size, const std::optional<Topology>& stated,
               bool willing) {
  const auto memory = willing && !stated ? SharedMemory::instance() : nullptr;
  store.set(key_of(rank), stated ? as_bytes(*stated) : own_member(memory.get()));
  if (rank == 0) store.set(kTable, make_table(store, world_size));
  const Topology table = as_topology(store.get(kTable));
  if (stated) return table;
  if (!reads_neighbours(store, table, rank)) {
    store.set(refused_key(table.machine_of(rank)), Bytes{1});
  }
  if (store.add("looked", 1) == world_size) store.set(kFinal, without_refused(store, table));
  return as_topology(store.get(kFinal));
}

}  // namespace

Topology agree_on_topology(const c10::intrusive_ptr<BoundedStore>& store, int rank, int world_size,
                           std::chrono::milliseconds timeout,
                           std::chrono::steady_clock::time_point since,
                           const std::optional<Topology>& stated, bool willing,
                           std::vector<int> watched) {
  Rendezvous rendezvous(
      store->under("meeting"), rank, world_size, timeout, since,
      c10::str("init_process_group: ", world_size, " ranks cannot agree on their machines"),
      "to learn which ranks share a machine", std::move(watched));
  const auto result = std::make_shared<std::optional<Topology>>();
  rendezvous.run(
      [=](const StorePtr& own) { *result = agree(*own, rank, world_size, stated, willing); });
  return **result;
}

std::string advice(const Topology& topology, int local_world_size, bool over_nccl) {
  if (topology.machines() == topology.world_size()) {
    // NCCL finds by itself what the ranks of a machine share.
    const bool nothing_lost = over_nccl && local_world_size == topology.world_size();
    if (local_world_size <= 1 || nothing_lost) return {};
    return c10::str("got ", topology.describe(), ", although ", local_world_size,
                    " ranks were started on this one: they cannot read each other's memory, as in "
                    "containers, under `ulimit -v` or `ulimit -f`, or without memfd_create, and ",
                    over_nccl ? "exchange with every other rank in place of in two levels"
                              : "send each other all data through sockets",
                    ". Lift the limit, state InitOptions::topology, or set "
                    "InitOptions::shared_memory to false if that is meant");
  }
  if (topology.machines() == 1 || topology.has_two_levels()) return {};
  return c10::str("got ", topology.describe(),
                  ": every rank exchanges with every other. Start the same number of ranks on each "
                  "machine, numbered one after the other, so that a machine sends each byte once");
}

}  // namespace zero
