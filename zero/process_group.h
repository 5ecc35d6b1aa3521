// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// Which ranks work together: a Group knows its rank, its size, the key-value
// store its ranks share and how to make communicators over it. It sends nothing
// itself.
//
//   zero::Group group = zero::init_process_group();
//
// init_process_group() understands the variables of torchrun (RANK, WORLD_SIZE,
// LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_*), of mpirun (OpenMPI's
// OMPI_COMM_WORLD_*, PMI_* and MPI_LOCAL* of MPICH and Intel MPI), of srun (SLURM_*), and of the
// local launcher (zero/launch.h), which speaks torchrun's. With none of them it is one process
// alone, and needs no network. With ZERO_JOIN=1 the process joins a job that runs: Group::joins().
#pragma once

#include <c10/core/Device.h>

#include <c10/util/intrusive_ptr.h>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/communicator.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace zero {

// Which ranks of a group share a machine: they reach each other through memory, and all others
// through a link that they share.
//
//   zero::Topology::of_equal_machines(8, 4)  // ranks 0 to 3 on one machine, 4 to 7 on another
//
// A value. Machines are numbered in the order of their first rank.
class Topology {
 public:
  static Topology of_one_machine(int world_size);
  // Throws c10::Error unless `ranks_per_machine` divides `world_size`.
  static Topology of_equal_machines(int world_size, int ranks_per_machine);
  // Ranks r and s share a machine if machine_of[r] == machine_of[s]. Throws c10::Error when it is
  // empty.
  explicit Topology(const std::vector<int>& machine_of);

  int world_size() const { return static_cast<int>(machine_of_.size()); }
  int machines() const { return machines_; }
  int machine_of(int rank) const { return machine_of_.at(static_cast<size_t>(rank)); }

  // Returns L if rank r is on machine r / L for every r; 0 if machines have different numbers of
  // ranks, or ranks of one machine do not follow one another.
  int ranks_per_machine() const;
  // True for several machines with several ranks each, as ranks_per_machine() says: exchanges then
  // work in two levels.
  bool has_two_levels() const;

  // Returns the topology of a subgroup: its rank r is rank `ranks[r]` here.
  Topology of_ranks(const std::vector<int>& ranks) const;

  // For example "2 machines with 4 ranks each".
  std::string describe() const;

  friend bool operator==(const Topology&, const Topology&) = default;

 private:
  std::vector<int> machine_of_;
  int machines_ = 0;
};

// The purpose of a communicator. Control messages are host memory and stay on
// Gloo, whatever carries the data.
enum class Purpose {
  kData,     // Parameters, gradients and norms.
  kControl,  // Messages by which ranks agree.
};

// The result of a BackendFactory: a backend, and how it moves rows. Any pointer to a backend
// converts.
struct NewBackend {
  template <typename Backend>
  NewBackend(c10::intrusive_ptr<Backend> made, RowTransport moves_rows = RowTransport::kPairwise)
      : backend(std::move(made)), rows(moves_rows) {}

  c10::intrusive_ptr<c10d::Backend> backend;
  RowTransport rows;  // The same on all ranks.
};

// Makes the transport of one communicator. `store` is private to it. Tests
// put their in-memory backend here.
using BackendFactory =
    std::function<NewBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                             Purpose purpose, std::chrono::milliseconds timeout)>;

// The factory that init_process_group() uses: NCCL for the data of a `device` that is a GPU, Gloo
// for everything else, and without `nccl` for that too, listening on `hostname`
// (zero/comm/backends/gloo.h). Data on Gloo passes through shared memory where ranks are on one
// machine (zero/comm/backends/shared_rows.h), unless `shared_memory` is false.
BackendFactory default_backend_factory(c10::Device device, const std::string& hostname,
                                       bool nccl = true, bool shared_memory = true);

// For ranks that join a job that runs: see Group::joins().
struct Joining {
  bool joins = false;  // this process does
  // Collective over `world_size` ranks that share `store`, for this call alone: finds their
  // machines. Default: one machine.
  std::function<Topology(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size)>
      find_topology = nullptr;
};

// A value: copies share the store and the counters behind its names. Thread
// safety: any number of threads may use one Group, but collective calls, and
// subgroup(), must come in the same order on all ranks.
class Group {
 public:
  // Makes a group of `world_size` ranks that share `store`. `name` must be the same on all of
  // them and different from other groups of that store. No call of the group waits
  // for `store` longer than `timeout` (zero/rendezvous/bounded_store.h).
  // `topology` must be the same on all ranks; default: one machine.
  Group(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, std::string name,
        BackendFactory factory, c10::Device device, std::chrono::milliseconds timeout,
        std::optional<Topology> topology = std::nullopt, Joining joining = {});

  int rank() const;
  int world_size() const;
  const std::string& name() const;
  // The device of this rank's parameters: cpu, or the GPU of its local rank.
  c10::Device device() const;
  std::chrono::milliseconds timeout() const;
  const c10::intrusive_ptr<c10d::Store>& store() const;

  // Which ranks of this group share a machine.
  const Topology& topology() const;

  // This rank's number in the group that init_process_group() made, and those
  // of all ranks of this group in rank order.
  int global_rank() const;
  const std::vector<int>& global_ranks() const;

  // The subgroup of the ranks `ranks` of this group, in that order. Sends
  // nothing. Subgroups of different ranks never meet, whatever their names, so a
  // mesh may call all its columns "dp"; calls with equal names and ranks return
  // one subgroup. Throws when this rank is not among `ranks`.
  Group subgroup(const std::vector<int>& ranks, const std::string& name) const;

  // Returns whether this process joins a job that runs already, as with ZERO_JOIN=1: rank() is then
  // its number among all processes that the job ever had, and world_size() one more. Such a group
  // makes no communicators, nor does a subgroup of it. It is for the constructor of ZeroOptimizer,
  // which waits until the others take it in; ZeroOptimizer::group() is then a group like any other.
  bool joins() const;
  // Collective over `members`: the same as subgroup(), but the ranks may be those of processes that
  // joined the job, numbered as their rank() says. `newcomers` are those of them, by rank in the
  // new group, that join with it: what they did wrong is no fault of the others.
  Group with_members(const std::vector<int>& members, const std::string& name,
                     std::vector<int> newcomers = {}) const;

  // Collective. A new communicator under its own prefix of the store. Two calls never share a
  // connection, not even with the same `name`: those are numbered, so the first call of one rank
  // meets the first call of another. While a thread makes one, a call of another thread with that
  // name throws c10::Error. Ranks that failed to make one, or made a call that another rank did not
  // make, meet at their next calls. Throws CommunicationError within the timeout and a second when
  // a rank does not arrive, ends or stops before it is connected, and says which one. After 10 s of
  // waiting one line on stderr says for whom. The communicator calls itself
  // "<group>/<name>" in errors. If the topology has two levels, the communicator works in two
  // levels and connects this rank with the others of its machine and with those that have its place
  // on other machines. It is flat, with a connection to every rank, with `two_level` false, which
  // must be equal on all ranks.
  std::unique_ptr<Communicator> make_communicator(const std::string& name, Purpose purpose,
                                                  bool two_level = true) const;

  // Collective the first time for a name and purpose. A communicator that all copies of this Group
  // share, made once and kept as long as one of them lives: for functions that are called again and
  // again and have no place of their own to keep one. All users of one name must order their calls
  // alike on all ranks.
  std::shared_ptr<Communicator> shared_communicator(const std::string& name, Purpose purpose) const;

  // How many communicators of this rank have failed or were ended by abort(): of this group, its
  // subgroups and the group that it is a part of.
  int64_t failures() const;

  // Sends nothing. A part of the store that is private to this call: numbered, so that the first
  // call of one rank meets that of another. If ranks have made different numbers of calls, their
  // next communicator brings them together.
  c10::intrusive_ptr<c10d::Store> make_store(const std::string& name) const;

 private:
  struct State;
  // The subgroup of `members` without its topology.
  std::shared_ptr<State> part(const std::vector<int>& members, const std::string& name) const;

  std::shared_ptr<const State> state_;
};

// How init_process_group() finds the other ranks, and what it makes of them.
struct InitOptions {
  // Bounds the rendezvous and every later operation. Default: the environment variable ZERO_TIMEOUT
  // (such as 90, 90s, 500ms, 10min or 2h) if set, else kDefaultTimeout.
  std::optional<std::chrono::milliseconds> timeout = std::nullopt;
  static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::minutes(10);
  // Default: cuda:LOCAL_RANK when built with CUDA and a GPU is there, else cpu. at::kCUDA without
  // a number is cuda:LOCAL_RANK too.
  std::optional<c10::Device> device = std::nullopt;
  // False: the data of GPUs is sent over Gloo too, through host memory. Much slower, and the only
  // way for ranks that share a GPU, which NCCL refuses.
  bool nccl = true;
  // False: this rank and others of its machine send each other data through sockets too, and count
  // as ranks of different machines.
  bool shared_memory = true;
  // Which ranks share a machine; must be equal on all ranks. Default: those that can read each
  // other's shared memory, which ranks in different containers of one machine cannot.
  std::optional<Topology> topology = std::nullopt;
  // The interface Gloo listens on: a host name or address of this machine.
  // Default: GLOO_SOCKET_IFNAME's interface if set; the loopback address when
  // all ranks are on this machine; else the address the host name resolves to.
  std::string hostname = {};
};

// Collective over all ranks of the job. Throws c10::Error when the environment
// contradicts itself (naming the variables, what they hold and what is
// expected) and, within the timeout and a second, when not all ranks arrive or
// the store does not answer. After 10 s of waiting one line on stderr says for
// whom.
Group init_process_group(const InitOptions& options = {});

// Collective. Returns the mean over the ranks of `group`, in the dtype, the shape and on the device
// of `value`, which has a floating-point dtype and the same shape on all ranks: for losses and
// other numbers to look at or to decide by, equal on every rank. Throws on every rank where shapes
// differ or a rank has no such value, which costs a small message more. Sums doubles; no gradient
// flows. Waits for the value where it is on a GPU. Copies of a Group share its communicator; pass
// ZeroOptimizer::group() where ranks may be recovered.
at::Tensor mean_over_ranks(const at::Tensor& value, const Group& group);

}  // namespace zero
