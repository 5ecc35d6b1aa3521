// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/agreement/communicators.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>

#include "zero/agreement/fingerprint.h"
#include "zero/agreement/same_on_all_ranks.h"
#include "zero/base/error_text.h"
#include "zero/comm/row_communicator.h"

namespace zero {
namespace {

void add(const Traffic& from, Traffic& to) {
  to.exchange_calls += from.exchange_calls;
  to.exchange_bytes_sent += from.exchange_bytes_sent;
  to.gather_calls += from.gather_calls;
  to.gather_bytes_sent += from.gather_bytes_sent;
  to.small_calls += from.small_calls;
  to.small_bytes_sent += from.small_bytes_sent;
  to.link_bytes_sent += from.link_bytes_sent;
}

}  // namespace

OptimizerCommunicators::OptimizerCommunicators(const Group& mesh)
    : control(mesh.make_communicator("control", Purpose::kControl)), channel(*control, mesh) {
  watch(*control);
}

OptimizerCommunicators::~OptimizerCommunicators() {
  // A failure from here on is the end of this rank's own communicators. The calls wait for one that
  // another thread reports.
  control->on_failure(nullptr);
  for (const auto& item : made_) item.second->on_failure(nullptr);
}

void OptimizerCommunicators::watch(Communicator& communicator) {
  communicator.on_failure([this](const std::string& reason) { abort(reason); });
}

Communicator* OptimizerCommunicators::get(const ShardDomains& all, const Group& group, Role role) {
  static constexpr const char* kNames[] = {"data", "replicas", "norm", "agreement"};
  const std::pair<GroupKey, Role> key{key_of(group), role};
  const auto found = made_.find(key);
  if (found != made_.end()) return found->second.get();
  const Purpose purpose = role == Role::kAgreement ? Purpose::kControl : Purpose::kData;
  // The result of a control message does not depend on the order in which it is combined.
  auto made = group.make_communicator(kNames[static_cast<int>(role)], purpose,
                                      purpose == Purpose::kControl || all.has_two_levels(group));
  if (purpose == Purpose::kData && !all.two_level) RowCommunicator(*made).sum_in_rank_order();
  watch(*made);
  Communicator* const added = made.get();
  std::unique_lock lock(mutex_);
  made_.emplace(key, std::move(made));
  const std::optional<std::string> reason = closed_by_;
  lock.unlock();
  if (reason) added->abort(*reason);  // which has not met it
  return added;
}

void OptimizerCommunicators::for_each_made(const std::function<void(Communicator&)>& visit) const {
  std::unique_lock lock(mutex_);
  // An insertion leaves the others where they are.
  for (const auto& item : made_) {
    lock.unlock();
    visit(*item.second);
    lock.lock();
  }
}

void OptimizerCommunicators::connect(const ShardDomains& all) {
  std::map<GroupKey, std::set<Role>> roles;
  std::vector<Group> groups;
  const auto want = [&](const Group& group, Role role) {
    roles[key_of(group)].insert(role);
    groups.push_back(group);
  };
  for (const ShardDomain& d : all.list) {
    want(d.group, Role::kData);
    if (d.replicas) want(*d.replicas, Role::kReplicas);
    if (all.uniform) continue;
    want(d.group, Role::kAgreement);
    if (d.replicas) want(*d.replicas, Role::kAgreement);
  }
  const bool mesh_has_data = roles[key_of(all.mesh)].contains(Role::kData);
  const Role norm_role = mesh_has_data ? Role::kData : Role::kNorm;
  want(all.mesh, norm_role);
  // Making one waits for its ranks: all ranks make them in one order.
  for (const Group& group : agreed_order(groups)) {
    for (const Role role : roles[key_of(group)]) get(all, group, role);
  }
  const auto comms = [&](const ShardDomain& d, Role data, Role replicas) {
    return DomainCommunicators{get(all, d.group, data),
                               d.replicas ? get(all, *d.replicas, replicas) : nullptr,
                               d.averaged_over};
  };
  // All ranks start what they send over these in one order.
  std::vector<Communicator*> on_device;
  for (const auto& [key, made] : made_) {
    if (key.second != Role::kAgreement) on_device.push_back(made.get());
  }
  if (on_device.size() > 1) RowCommunicator::put_in_one_order(on_device);
  norm = get(all, all.mesh, norm_role);
  for (const ShardDomain& d : all.list) {
    domains.push_back(comms(d, Role::kData, Role::kReplicas));
    if (!all.uniform) agreements_.push_back(comms(d, Role::kAgreement, Role::kAgreement));
  }
  home = domains[all.home_domain];
}

void OptimizerCommunicators::check_each_domain(
    const std::function<void(int64_t, Communicator&)>& check, const std::string& call) {
  std::string problem;
  for (size_t d = 0; d < agreements_.size(); ++d) {
    for (Communicator* group : {agreements_[d].data, agreements_[d].replicas}) {
      if (group == nullptr) continue;
      try {
        check(static_cast<int64_t>(d), *group);
      } catch (const std::exception& error) {
        // Others may not know: they get as far as the common check, and so must this rank.
        if (problem.empty())
          problem = error_text(error) + " (ranks of group " + group->name() + ")";
      }
    }
  }
  check_same_on_all_ranks(*control, problem, {}, call);
}

void OptimizerCommunicators::check_domains(
    const ShardDomains& all, const std::function<std::vector<std::string>(int64_t)>& lines) {
  if (all.uniform) return;
  check_each_domain([&](int64_t domain, Communicator& group) {
    check_same_on_all_ranks(group, "", lines(domain));
  });
}

void OptimizerCommunicators::agree_on_half(const ShardDomains& all, bool half_here) {
  any_half = half_here;
  if (all.uniform) return;
  at::Tensor word = at::empty({1}, at::TensorOptions().dtype(at::kInt));
  word.fill_(half_here ? 1 : 0);
  control->all_reduce_max(word, "whether any parameter is fp16").wait();
  any_half = word.item<int32_t>() != 0;
}

namespace {

// Combines values of the ranks of one domain in one message and, if they differ, a second one.
struct DomainMessage {
  at::Tensor words;  // fingerprints of arguments and flags, for a maximum
  std::vector<uint8_t> flags;
  at::Tensor bits;  // of the flags, for an OR
};

const int32_t* arguments_of(const DomainMessage& message) {
  return message.words.const_data_ptr<int32_t>();
}
const int32_t* flags_of(const DomainMessage& message) {
  return arguments_of(message) + kFingerprintWords;
}

// Starts `send` for every domain before it waits for the first.
template <typename Send>
void for_all_domains(size_t count, Send send) {
  std::vector<Pending> pending;
  for (size_t d = 0; d < count; ++d) {
    if (Pending sent = send(d); sent.valid()) pending.push_back(std::move(sent));
  }
  for (Pending& p : pending) p.wait();
}

}  // namespace

bool OptimizerCommunicators::agree_domains(const std::vector<std::string>& arguments,
                                           const std::vector<int64_t>& domain_of,
                                           std::vector<uint8_t>& used) {
  const size_t count = agreements_.size();
  std::vector<DomainMessage> messages(count);
  for (size_t p = 0; p < domain_of.size(); ++p) messages[domain_of[p]].flags.push_back(used[p]);
  for (size_t d = 0; d < count; ++d) {
    messages[d].words = at::empty({2 * kFingerprintWords}, at::TensorOptions().dtype(at::kInt));
    std::ranges::copy(fingerprint_of(arguments[d]), messages[d].words.mutable_data_ptr<int32_t>());
  }
  // First within every domain, then between those results and the replicas'.
  for (Communicator* DomainCommunicators::*link :
       {&DomainCommunicators::data, &DomainCommunicators::replicas}) {
    for_all_domains(count, [&](size_t d) {
      DomainMessage& m = messages[d];
      std::ranges::copy(fingerprint_of(m.flags),
                        m.words.mutable_data_ptr<int32_t>() + kFingerprintWords);
      Communicator* group = agreements_[d].*link;
      return group == nullptr ? Pending() : group->all_reduce_max(m.words, "call and arguments");
    });
    for_all_domains(count, [&](size_t d) {
      DomainMessage& m = messages[d];
      m.bits = at::Tensor();
      Communicator* group = agreements_[d].*link;
      if (group == nullptr || all_equal(flags_of(m))) return Pending();
      m.bits = pack_flags(m.flags);
      return group->all_reduce_or(m.bits, "used parameters");
    });
    for (DomainMessage& m : messages) {
      if (m.bits.defined()) unpack_flags(m.bits, m.flags);
    }
  }
  std::vector<size_t> next(count, 0);
  for (size_t p = 0; p < domain_of.size(); ++p) {
    const int64_t d = domain_of[p];
    used[p] = messages[d].flags[next[d]++];
  }
  return std::ranges::all_of(messages,
                             [](const DomainMessage& m) { return all_equal(arguments_of(m)); });
}

void OptimizerCommunicators::close_on_error(const std::function<void()>& body,
                                            const std::string& what) {
  try {
    body();
  } catch (const std::exception& error) {
    if (!failed().empty()) throw;
    const std::string text = (what.empty() ? "" : what + ": ") + error_text(error);
    abort(text);
    TORCH_CHECK(what.empty(), text);
    throw;
  } catch (...) {
    abort((what.empty() ? "" : what + ": ") + kNoStdException);
    throw;
  }
}

void OptimizerCommunicators::with_peer_reports(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    if (failed().empty()) throw;
    const std::string text = error_text(error);
    throw_error(is_of_communication(error), text + channel.report_failure(text));
  }
}

std::string OptimizerCommunicators::failed() const {
  std::string text = control->failed();
  for_each_made([&](const Communicator& made) {
    if (text.empty()) text = made.failed();
  });
  return text;
}

void OptimizerCommunicators::check() const {
  const std::string failure = failed();
  if (!failure.empty()) throw_communication_error(failure);
}

void OptimizerCommunicators::abort(const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (closed_by_) return;
    closed_by_ = reason;
  }
  // Before any connection is closed, so that the peers find it when they notice.
  channel.announce(reason);
  // First what peers wait for on the host.
  control->abort(reason);
  for_each_made([&](Communicator& made) { made.abort(reason); });
}

bool OptimizerCommunicators::waits_on_host(c10::Device device) const {
  return std::ranges::any_of(made_, [&](const auto& made) {
    return made.first.second != Role::kAgreement && made.second->world_size() > 1 &&
           RowCommunicator(*made.second).waits_on_host(device);
  });
}

Traffic OptimizerCommunicators::data_traffic() const {
  Traffic sum;
  for (const auto& [key, communicator] : made_) {
    if (key.second != Role::kAgreement) add(communicator->traffic(), sum);
  }
  return sum;
}

Traffic OptimizerCommunicators::control_traffic() const {
  Traffic sum = control->traffic();
  for (const auto& [key, communicator] : made_) {
    if (key.second == Role::kAgreement) add(communicator->traffic(), sum);
  }
  return sum;
}

}  // namespace zero
