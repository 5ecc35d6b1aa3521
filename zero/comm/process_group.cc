// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0

#include "zero/process_group.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <mutex>
#include <numeric>

#include "zero/base/descriptors.h"
#include "zero/base/error_text.h"
#include "zero/base/normal_tensors.h"
#include "zero/base/own_process.h"
#include "zero/base/plain_text.h"
#include "zero/comm/backends/gloo.h"
#include "zero/comm/backends/nccl.h"
#include "zero/comm/backends/shared_rows.h"
#include "zero/comm/exchange/row_exchange.h"
#include "zero/comm/exchange/two_level_exchange.h"
#include "zero/comm/row_communicator.h"
#include "zero/comm/store_names.h"
#include "zero/rendezvous/bounded_store.h"
#include "zero/rendezvous/environment.h"
#include "zero/rendezvous/rendezvous.h"

namespace zero {
namespace {

using std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// No call waits longer for the removal of keys that earlier ones have left.
constexpr milliseconds kRemovalLimit{500};

// The same for equal numbers on all ranks.
template <typename Numbers>
uint64_t hash_of(const Numbers& numbers) {
  uint64_t hash = 14695981039346656037u;
  for (const auto n : numbers) hash = (hash ^ static_cast<uint64_t>(n)) * 1099511628211u;
  return hash;
}

// A text for a list of ranks; a mesh has thousands of long ones.
std::string fingerprint(const std::vector<int>& ranks) {
  return plain_text(ranks.size(), "-", std::hex, hash_of(ranks));
}

}  // namespace

struct Group::State {
  c10::intrusive_ptr<BoundedStore> bounded;
  StorePtr store;  // The same.
  int rank;
  int world_size;
  std::string name;
  BackendFactory factory;
  c10::Device device = at::kCPU;
  milliseconds timeout;
  std::vector<int> global_ranks;
  // After a recovery those of all its ranks, also in subgroups: one that ends calls off what the
  // others begin. Empty: global_ranks.
  std::vector<int> watched;
  std::optional<Topology> topology;  // always there
  Joining joining;
  bool of_joining = false;     // a subgroup of one that joins: no other process has it
  std::vector<int> newcomers;  // joined the job with this group; the same on all ranks
  OwnProcess process;
  std::shared_ptr<std::atomic<int64_t>> failures;  // of all groups of one init_process_group()

  std::shared_ptr<StoreNames> names = std::make_shared<StoreNames>();  // in `store`
  std::shared_ptr<StoreNames> first_names;  // after a recovery, of the group that it began with

  // Held while a shared communicator is made, so that two threads do not make two.
  mutable std::mutex shared_mutex;
  mutable std::map<std::pair<std::string, Purpose>, std::shared_ptr<Communicator>> shared;
};

Group::Group(StorePtr store, int rank, int world_size, std::string name, BackendFactory factory,
             c10::Device device, milliseconds timeout, std::optional<Topology> topology,
             Joining joining) {
  TORCH_CHECK(store, "Group \"", name, "\": expected a store, got a null pointer");
  TORCH_CHECK(0 <= rank && rank < world_size, "Group \"", name, "\": expected a rank in [0, ",
              world_size, "), got ", rank);
  TORCH_CHECK(timeout.count() > 0 && timeout <= kLongestTimeout, "Group \"", name,
              "\": expected a timeout of more than 0 ms and at most a year, got ", timeout.count(),
              " ms on rank ", rank);
  TORCH_CHECK(factory || world_size == 1, "Group \"", name, "\": expected a backend factory for ",
              world_size, " ranks, got none");
  if (!topology) topology = Topology::of_one_machine(world_size);
  TORCH_CHECK(topology->world_size() == world_size, "Group \"", name,
              "\": expected a topology of its ", world_size, " ranks, got one of ",
              topology->world_size(), " on rank ", rank);
  auto state = make_owned<State>();
  state->topology = std::move(topology);
  state->joining = std::move(joining);
  state->failures = std::make_shared<std::atomic<int64_t>>(0);
  state->bounded = BoundedStore::of(std::move(store), timeout);
  state->store = state->bounded;
  state->rank = rank;
  state->world_size = world_size;
  state->name = std::move(name);
  state->factory = std::move(factory);
  state->device = device;
  state->timeout = timeout;
  state->global_ranks.resize(static_cast<size_t>(world_size));
  std::iota(state->global_ranks.begin(), state->global_ranks.end(), 0);
  state_ = std::move(state);
}

int Group::rank() const { return state_->rank; }
int Group::world_size() const { return state_->world_size; }
const std::string& Group::name() const { return state_->name; }
c10::Device Group::device() const { return state_->device; }
milliseconds Group::timeout() const { return state_->timeout; }
const Topology& Group::topology() const { return *state_->topology; }
const StorePtr& Group::store() const { return state_->store; }
int Group::global_rank() const { return state_->global_ranks[static_cast<size_t>(rank())]; }
const std::vector<int>& Group::global_ranks() const { return state_->global_ranks; }

Group Group::subgroup(const std::vector<int>& ranks, const std::string& name) const {
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  const bool distinct = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
  TORCH_CHECK(!sorted.empty() && distinct && sorted.front() >= 0 && sorted.back() < world_size(),
              "subgroup \"", name, "\" of group \"", this->name(),
              "\": expected different ranks in [0, ", world_size(), "), got ", ranks, " on rank ",
              rank());
  const auto here = std::find(ranks.begin(), ranks.end(), rank());
  TORCH_CHECK(here != ranks.end(), "subgroup \"", name, "\" of group \"", this->name(), "\": rank ",
              rank(), " is not among its ranks ", ranks, ": only its members may make it");

  auto state = part(ranks, name);
  state->topology = topology().of_ranks(ranks);
  for (const int rank : ranks) {
    state->global_ranks.push_back(state_->global_ranks[static_cast<size_t>(rank)]);
  }
  state->watched = state_->watched;
  state->of_joining = joins() || state_->of_joining;
  Group group = *this;
  group.state_ = std::move(state);
  return group;
}

std::shared_ptr<Group::State> Group::part(const std::vector<int>& members,
                                          const std::string& name) const {
  auto state = make_owned<State>();
  const std::string key = plain_text("subgroup/", name, "/", fingerprint(members));
  state->names = state_->names->subgroup(key);
  state->bounded = state_->bounded->under(key);
  state->store = state->bounded;
  state->rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  state->world_size = static_cast<int>(members.size());
  state->name = plain_text(this->name(), "/", name);
  state->factory = state_->factory;
  state->device = device();
  state->timeout = timeout();
  state->failures = state_->failures;
  return state;
}

bool Group::joins() const { return state_->joining.joins; }

namespace {

// Collective over `global_ranks`: their machines, as `find` knows. Calls it on a thread that
// is left behind when one of them ends.
Topology find_machines(const decltype(Joining::find_topology)& find, const std::string& name,
                       const c10::intrusive_ptr<BoundedStore>& store, int rank, int size,
                       milliseconds timeout, const std::vector<int>& global_ranks) {
  if (!find) return Topology::of_one_machine(size);
  Rendezvous rendezvous(
      store, rank, size, timeout, std::chrono::steady_clock::now(),
      c10::str("group \"", name, "\": its ", size, " ranks cannot find their machines"),
      c10::str("to find the machines of group \"", name, "\""), global_ranks);
  const auto found = std::make_shared<std::optional<Topology>>();
  rendezvous.run([=](const StorePtr& own) { *found = find(own, rank, size); });
  return **found;
}

}  // namespace

Group Group::with_members(const std::vector<int>& members, const std::string& name,
                          std::vector<int> newcomers) const {
  const auto is_new = [&](int number) { return number >= world_size(); };
  auto state = part(members, name);
  TORCH_INTERNAL_ASSERT(state->rank < state->world_size, "one of the members");
  if (!joins() && std::none_of(members.begin(), members.end(), is_new)) {
    state->topology = topology().of_ranks(members);
    for (const int rank : members) {
      state->global_ranks.push_back(state_->global_ranks[static_cast<size_t>(rank)]);
    }
  } else {
    state->global_ranks = members;
    state->joining.find_topology = state_->joining.find_topology;
    const auto keys = std::make_shared<StoreKeys>();
    const auto store =
        state->bounded->under(plain_text("machines/", state->names->next("machines")))
            ->noting(keys);
    state->topology = find_machines(state->joining.find_topology, state->name, store, state->rank,
                                    state->world_size, timeout(), members);
    state->names->add_keys("machines", keys, {});
  }
  state_->names->add_recovery(state->names);
  state->first_names = state_->names;
  state->watched = state->global_ranks;
  state->newcomers = std::move(newcomers);
  Group group = *this;
  group.state_ = std::move(state);
  return group;
}

int64_t Group::failures() const { return *state_->failures; }

StorePtr Group::make_store(const std::string& name) const {
  const std::string key = StoreNames::name_of_store(name);
  return state_->bounded->under(plain_text(key, "/", state_->names->next(key)));
}

namespace {

// Makes the transport of ranks 0 to size - 1 that share `store`.
using Connect = std::function<NewBackend(const StorePtr& store, int rank, int size)>;

// Collective. `rank` is one of `machines`.
std::shared_ptr<RowExchange> connect_one_level(const Connect& connect, const StorePtr& store,
                                               const Topology& machines, int rank,
                                               milliseconds timeout) {
  BackendRanks ranks;
  ranks.over_links = machines.machines() > 1;
  for (int r = 0; r < machines.world_size(); ++r) ranks.machines.push_back(machines.machine_of(r));
  const NewBackend made = connect(store, rank, machines.world_size());
  return make_row_exchange(made.backend, made.rows, timeout, ranks);
}

// The same. The levels find each other under prefixes of `store`.
std::shared_ptr<RowExchange> connect_two_levels(const Connect& connect, const StorePtr& store,
                                                const Topology& machines, int rank,
                                                milliseconds timeout) {
  const int local_ranks = machines.ranks_per_machine();
  const TwoLevelExchange::RankInLevels place{machines.machines(), local_ranks, rank / local_ranks,
                                             rank % local_ranks};
  const auto part = [&](const std::string& level, int number) -> StorePtr {
    return BoundedStore::of(store, timeout)->under(plain_text(level, "/", number));
  };
  BackendRanks machine;
  for (int l = 0; l < local_ranks; ++l) {
    machine.names.push_back(place.machine * local_ranks + l);
  }
  BackendRanks peers;
  peers.over_links = true;
  for (int g = 0; g < place.machines; ++g) {
    peers.names.push_back(g * local_ranks + place.local);
  }
  const NewBackend inside = connect(part("machine", place.machine), place.local, local_ranks);
  const NewBackend between = connect(part("place", place.local), place.machine, place.machines);
  return make_owned<TwoLevelExchange>(
      make_row_exchange(inside.backend, inside.rows, timeout, machine),
      make_row_exchange(between.backend, between.rows, timeout, peers), place,
      inside.rows == RowTransport::kWhole);
}

// Returns how `own`, this rank's `what`, differs from what the first rank has claimed as `key`, and
// what to do; empty where all ranks have come with the same.
std::string difference(c10d::Store& store, int rank, const std::string& key, const char* what,
                       const std::string& own, const char* advice) {
  constexpr const char* kOnRank = " on rank ";
  const std::string text = plain_text(own, kOnRank, rank);
  const std::string first = claim(store, key, text);
  if (first.substr(0, first.rfind(kOnRank)) == own) return {};
  return c10::str("expected the same ", what, " on every rank, got ", first, " and ", text, "; ",
                  advice);
}

// Ranks with other levels have other connections to make, and would wait for each other.
void agree_on_levels(c10d::Store& store, int rank, const std::string& levels) {
  const std::string problem = difference(store, rank, StoreNames::kLevels, "levels", levels,
                                         "give the group the same topology on all ranks, and "
                                         "make_communicator() the same two_level");
  TORCH_CHECK_VALUE(problem.empty(), problem);
}

// Removes keys of earlier calls once all ranks have come to this one; StoreNames says why. Where a
// transport connects without all ranks, or the store is late, they stay.
void remove_keys(const Rendezvous& rendezvous, const BoundedStore& store,
                 const StoreNames::KeyLists& keys) noexcept {
  try {
    if (rendezvous.all_have_come()) store.within(kRemovalLimit)->remove(keys);
  } catch (const std::exception&) {  // the communicator is there
  }
}

// Calls meet(). What is neither an error of communication nor a lack of memory here may be one of a
// newcomer's, and a rank that is none may go on without it.
template <typename Meet>
void meet_newcomers(const std::vector<int>& newcomers, int rank, Meet meet) {
  try {
    meet();
  } catch (const c10::Error& error) {
    if (newcomers.empty() || std::ranges::find(newcomers, rank) != newcomers.end()) throw;
    if (is_out_of_memory(error)) throw;
    throw_communication_error(error_text(error));
  }
}

}  // namespace

std::unique_ptr<Communicator> Group::make_communicator(const std::string& name, Purpose purpose,
                                                       bool two_level) const {
  const std::string full_name = plain_text(this->name(), "/", name);
  const std::string who = c10::str("communicator \"", full_name, "\" (this is rank ", rank(), ")");
  state_->process.check(who);
  TORCH_CHECK(!joins() && (!state_->of_joining || world_size() == 1), "communicator \"", full_name,
              "\": expected a group of ranks that run, got that of process ", global_rank(),
              ", which joins the job; make the optimizer over the group of init_process_group(), "
              "and communicators over ZeroOptimizer::group()");
  if (world_size() == 1) {
    auto alone = std::make_unique<Communicator>(nullptr, full_name, timeout());
    RowCommunicator(*alone).count_failure_in(state_->failures);
    return alone;
  }
  const std::string key = plain_text("communicator/", this->name(), "/", name);
  const std::shared_ptr<StoreNames> names = state_->names;
  const auto only_use = names->only_use(key, who);
  const auto start = std::chrono::steady_clock::now();
  const int number =
      asking_as(c10::str("communicator \"", full_name, "\": rank ", rank(), " of ", world_size()),
                [&] { return names->next_communicator(*state_->bounded->within(timeout()), key); });
  const auto keys = std::make_shared<StoreKeys>();
  const auto store = state_->bounded->under(plain_text(key, "/", number))->noting(keys);
  Rendezvous rendezvous(
      store, rank(), world_size(), timeout(), start,
      c10::str("communicator \"", full_name, "\": cannot connect its ", world_size(), " ranks"),
      c10::str("to connect communicator \"", full_name, "\""),
      state_->watched.empty() ? global_ranks() : state_->watched);
  const auto connect = [factory = state_->factory, purpose, limit = timeout()](
                           const StorePtr& store, int rank, int size) {
    return factory(store, rank, size, purpose, limit);
  };
  const bool levels = two_level && topology().has_two_levels();
  const std::string text = levels ? "two levels of " + topology().describe() : "one level";
  // Shared with a thread that may be left behind.
  const auto exchange = std::make_shared<std::shared_ptr<RowExchange>>();
  const Rendezvous::Work work = [connect, names, exchange, levels, text, machines = topology(),
                                 rank = rank(), limit = timeout()](const StorePtr& own) {
    agree_on_levels(*own, rank, text);
    names->publish_uses(*own);
    *exchange =
        (levels ? connect_two_levels : connect_one_level)(connect, own, machines, rank, limit);
    names->adopt_uses(*own);
  };
  meet_newcomers(state_->newcomers, rank(), [&] { rendezvous.run(work); });
  StoreNames::KeyLists unused;
  names->take_unused(key, unused);
  if (state_->first_names) state_->first_names->take_unused_of_recoveries(*names, unused);
  if (!unused.empty()) remove_keys(rendezvous, *store, unused);
  names->add_keys(key, keys, *exchange);
  auto made =
      RowCommunicator::over(std::move(*exchange), rank(), world_size(), full_name, timeout());
  RowCommunicator(*made).count_failure_in(state_->failures);
  RowCommunicator(*made).set_newcomers(state_->newcomers);
  return made;
}

std::shared_ptr<Communicator> Group::shared_communicator(const std::string& name,
                                                         Purpose purpose) const {
  state_->process.check(
      c10::str("communicator \"", this->name(), "/", name, "\" (this is rank ", rank(), ")"));
  const std::lock_guard<std::mutex> lock(state_->shared_mutex);
  std::shared_ptr<Communicator>& shared = state_->shared[{name, purpose}];
  if (!shared) shared = make_communicator(name, purpose);
  return shared;
}

namespace {

// Collective. Throws on all ranks where one has no value, because of `problem`, and where shapes
// differ: Gloo ends the process where sizes do.
void check_values(const at::Tensor& value, const std::exception_ptr& problem,
                  const std::string& text_of_problem, Communicator& means) {
  const auto hash = problem ? 0 : static_cast<int64_t>(hash_of(value.sizes()) / 2);
  const at::Tensor words = at::tensor({int64_t{problem ? 1 : 0}, hash, -hash}, at::kLong);
  means.all_reduce_max(words, "the shape of a mean").wait();
  if (words[0].item<int64_t>() != 0) {
    const auto all = means.all_gather_text(text_of_problem, "problems of a mean");
    if (problem) std::rethrow_exception(problem);
    const auto other = std::ranges::find_if(all, [](auto& text) { return !text.empty(); });
    TORCH_CHECK(false, "mean_over_ranks() was given up by all ranks because of ", *other);
  }
  if (words[1].item<int64_t>() == -words[2].item<int64_t>()) return;
  const auto shapes = means.all_gather_text(plain_text(value.sizes()), "shapes of a mean");
  const auto other = std::ranges::find_if(shapes, [&](auto& shape) { return shape != shapes[0]; });
  TORCH_CHECK(false, "mean_over_ranks(): expected the same shape on every rank, got ", shapes[0],
              " on rank 0 and ", *other, " on rank ", other - shapes.begin(),
              "; pass numbers that every rank has, such as a sum and a count (this is rank ",
              means.rank(), " of ", means.world_size(), ")");
}

}  // namespace

at::Tensor mean_over_ranks(const at::Tensor& value, const Group& group) {
  const NormalTensors normal;
  const at::NoGradGuard no_grad;
  at::Tensor sum;
  std::exception_ptr problem;  // which the others wait for
  std::string text;
  try {
    TORCH_CHECK(value.defined() && at::isFloatingType(value.scalar_type()),
                "mean_over_ranks(): expected a floating-point tensor, got ",
                value.defined() ? c10::toString(value.scalar_type()) : "an undefined one",
                " (this is rank ", group.rank(), " of ", group.world_size(), ")");
    sum = value.detach().to(at::kCPU, at::kDouble, false, true).reshape({-1});
  } catch (const std::exception& error) {
    problem = std::current_exception();
    text = c10::str("rank ", group.rank(), ": ", error_text(error));
  }
  const auto means = group.shared_communicator("means", Purpose::kControl);
  check_values(value, problem, text, *means);
  means->all_reduce_sum(sum, "a mean").wait();
  return sum.div_(group.world_size()).view(value.sizes()).to(value.options());
}

namespace {

// Before a backend is made: Gloo would connect the part of the ranks that fits together, and wait
// for the rest until the timeout. `transport` must be equal, too. `problem` is why this rank cannot
// make one, or empty: all ranks throw it.
void agree_on_world_size(c10d::Store& store, int rank, int world_size, const char* transport,
                         milliseconds timeout, std::string problem) {
  // The first verdict counts. Without libuv, c10d's server wakes no waiting rank for a compareSet.
  const auto decide = [&](const std::string& verdict) {
    claim(store, "verdict", verdict);
    store.set("decided", "1");
  };
  // Before this rank is counted: "equal" needs all of them.
  if (!problem.empty()) {
    decide(c10::str("rank ", rank, ": ", problem));
    TORCH_CHECK_VALUE(false, problem);
  }
  problem = difference(store, rank, "transport", "transport", transport,
                       "give all ranks a device of the same type, and InitOptions::nccl the same "
                       "value");
  if (problem.empty()) {
    problem =
        difference(store, rank, "world_size", "world size", std::to_string(world_size),
                   "start all ranks with the same WORLD_SIZE, or make the group with the same one");
  }
  if (!problem.empty()) {
    decide(problem);
    TORCH_CHECK_VALUE(false, problem);
  }
  if (store.add("agreed", 1) == world_size) decide("equal");
  store.wait({"decided"}, timeout);
  const std::string verdict = store.get_to_str("verdict");
  TORCH_CHECK_VALUE(verdict == "equal", verdict);
}

// Why this rank cannot use NCCL with its GPU, or empty. All ranks call it first.
std::string nccl_problem(c10d::Store& store, int rank, c10::Device device) {
  const std::string problem = nccl_environment_problem();
  if (!problem.empty()) return problem;
  const std::string gpu = gpu_name(device), own = std::to_string(rank);
  const std::string first = claim(store, "gpu/" + gpu, own);
  if (first == own) return {};
  return c10::str("expected a GPU for each rank, got ", gpu, " for rank ", first, " and rank ", own,
                  "; start at most as many ranks as there are GPUs, give each one of its own by "
                  "LOCAL_RANK or InitOptions::device, or set InitOptions::nccl to false, which is "
                  "slow");
}

}  // namespace

BackendFactory default_backend_factory(c10::Device device, const std::string& hostname, bool nccl,
                                       bool shared_memory) {
  return [=](StorePtr store, int rank, int world_size, Purpose purpose,
             milliseconds timeout) -> NewBackend {
    const bool over_nccl = purpose == Purpose::kData && device.is_cuda() && nccl;
    std::string problem = over_nccl ? nccl_problem(*store, rank, device) : gloo_problem(hostname);
    if (!over_nccl && problem.empty()) {
      problem = make_room_for_descriptors(gloo_descriptors(world_size));
    }
    agree_on_world_size(*store, rank, world_size, over_nccl ? "NCCL" : "Gloo", timeout, problem);
    if (over_nccl) {
      // NCCL keeps its store for connections that it makes later.
      store = BoundedStore::of(store, timeout)->each_within(timeout);
      return {make_nccl_backend(store, rank, world_size, device, timeout), RowTransport::kWhole};
    }
    const auto gloo = make_gloo_backend(store, rank, world_size, timeout, hostname);
    return purpose == Purpose::kData ? share_memory(gloo, timeout, shared_memory) : gloo;
  };
}

}  // namespace zero
