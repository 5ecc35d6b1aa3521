// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
//
// The communicators of one optimizer, which no other object uses: control and norm over the mesh,
// data over each domain. Without placements the mesh is the one group of the optimizer, which then
// has one control and one data communicator.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "zero/agreement/control_channel.h"
#include "zero/agreement/shard_domains.h"
#include "zero/comm/domain_communicators.h"
#include "zero/comm/group_order.h"

namespace zero {

// What close_on_error() is given for an update of shards: after an error some are updated while
// others are not, and there is no way back.
inline constexpr const char* kFailedUpdate = "the update of this rank's shard failed";

struct OptimizerCommunicators {
  // Collective over `mesh`. Only what is needed to agree that all is well.
  explicit OptimizerCommunicators(const Group& mesh);
  ~OptimizerCommunicators();

  // Collective over the mesh. Makes the rest and sends nothing else.
  void connect(const ShardDomains& all);

  // Collective over the mesh, only where it is not uniform; see check_same_on_all_ranks().
  // `lines(d)` describes what the ranks of domain d must have in common. Throws on every rank of
  // the mesh.
  void check_domains(const ShardDomains& all,
                     const std::function<std::vector<std::string>(int64_t)>& lines);
  // Collective over the mesh, where it is not uniform: sets any_half, so that all ranks scale
  // alike.
  void agree_on_half(const ShardDomains& all, bool half_here);
  // Collective over the mesh, where it is not uniform: makes used[p] the maximum over parameter
  // p's domain, `domain_of[p]`, and its replicas. `arguments[d]` are those of the call that concern
  // domain d: returns whether ranks that hold the same parameters gave the same everywhere. A
  // message in each domain and to its replicas, and one more where ranks used different parameters.
  bool agree_domains(const std::vector<std::string>& arguments,
                     const std::vector<int64_t>& domain_of, std::vector<uint8_t>& used);
  // Calls check(d, group) for every domain d and each of the two groups that hold the same
  // parameters, all of them even if one throws; then all ranks of the mesh throw. `call` as in
  // check_same_on_all_ranks().
  void check_each_domain(const std::function<void(int64_t, Communicator&)>& check,
                         const std::string& call = {});

  // Runs body(), which communicates. When it throws and a communicator has failed, this announces
  // it to the other ranks and adds what they announce to the error, which stays a
  // CommunicationError if it was one.
  void with_peer_reports(const std::function<void()>& body);

  // Runs what must not stop half-way, since the other ranks wait for it, or have changed what this
  // one has not. If it throws while all communicators work, they are closed. The error begins with
  // `what` went wrong, if that is given.
  void close_on_error(const std::function<void()>& body, const std::string& what = {});

  // The first failure of any communicator; empty if there is none.
  std::string failed() const;
  // Throws CommunicationError for that. An operation that a stream waits for ends without an error
  // when it is aborted.
  void check() const;
  // Closes all connections, so that no rank waits for this one until its timeout, and lets the
  // others find `reason`. The failure of any communicator does the same.
  void abort(const std::string& reason) noexcept;
  // Returns whether the host waits where data in memory of `device` is sent to other ranks: shards,
  // sums over replicas, or norms.
  bool waits_on_host(c10::Device device) const;
  Traffic data_traffic() const;
  Traffic control_traffic() const;

  int rank() const { return control->rank(); }  // in the mesh: the one that errors name

  const std::unique_ptr<Communicator> control;  // over the mesh
  ControlChannel channel;                       // over the mesh
  Communicator* norm = nullptr;                 // data over the mesh
  DomainCommunicators home;                     // for frozen parameters and buffers
  std::vector<DomainCommunicators> domains;     // data, by domain
  bool any_half = false;                        // whether any rank of the mesh has fp16 parameters

 private:
  // The use of a communicator. One group may have several roles.
  enum class Role { kData, kReplicas, kNorm, kAgreement };

  // Makes it the first time.
  Communicator* get(const ShardDomains& all, const Group& group, Role role);
  void watch(Communicator& communicator);
  // Calls visit() for each of made_, also while another thread makes one, and may wait in it.
  void for_each_made(const std::function<void(Communicator&)>& visit) const;

  mutable std::mutex mutex_;  // of made_ and closed_by_: any thread may report a failure
  std::map<std::pair<GroupKey, Role>, std::unique_ptr<Communicator>> made_;
  std::vector<DomainCommunicators> agreements_;  // host communicators, by domain; empty if uniform
  std::optional<std::string> closed_by_;         // the reason of abort()
};

}  // namespace zero
