// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer_links.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "zero/construction_check.h"
#include "zero/error_text.h"

namespace zero {
namespace {

void add(const Traffic& from, Traffic& to) {
  to.exchange_calls += from.exchange_calls;
  to.exchange_bytes_sent += from.exchange_bytes_sent;
  to.gather_calls += from.gather_calls;
  to.gather_bytes_sent += from.gather_bytes_sent;
  to.small_calls += from.small_calls;
  to.small_bytes_sent += from.small_bytes_sent;
}

}  // namespace

OptimizerLinks::OptimizerLinks(const Group& mesh)
    : control(mesh.make_communicator("control", Purpose::kControl)), channel(*control, mesh) {}

Communicator* OptimizerLinks::get(const Group& group, Role role) {
  static constexpr const char* kNames[] = {"data", "replicas", "norm", "agreement"};
  const std::pair<GroupKey, Role> key{key_of(group), role};
  const auto found = made_.find(key);
  if (found != made_.end()) return found->second.get();
  const Purpose purpose = role == Role::kAgreement ? Purpose::kControl : Purpose::kData;
  auto made = group.make_communicator(kNames[static_cast<int>(role)], purpose);
  return made_.emplace(key, std::move(made)).first->second.get();
}

void OptimizerLinks::connect(const Domains& all) {
  // The home domain, so that replicas get what belongs to no parameter group too.
  Domain home_domain{all.home, std::nullopt, 1};
  for (const Domain& d : all.list) {
    if (key_of(d.group) == key_of(all.home)) {
      home_domain = d;
      break;
    }
  }
  std::map<GroupKey, std::vector<Role>> roles;
  std::vector<Group> groups;
  const auto want = [&](const Group& group, Role role) {
    auto& list = roles[key_of(group)];
    if (std::find(list.begin(), list.end(), role) == list.end()) list.push_back(role);
    groups.push_back(group);
  };
  want(home_domain.group, Role::kData);
  for (const Domain& d : all.list) {
    want(d.group, Role::kData);
    if (d.replicas) want(*d.replicas, Role::kReplicas);
    if (all.uniform) continue;
    want(d.group, Role::kAgreement);
    if (d.replicas) want(*d.replicas, Role::kAgreement);
  }
  const auto& mesh_roles = roles[key_of(all.mesh)];
  const bool mesh_has_data =
      std::find(mesh_roles.begin(), mesh_roles.end(), Role::kData) != mesh_roles.end();
  const Role norm_role = mesh_has_data ? Role::kData : Role::kNorm;
  want(all.mesh, norm_role);
  // Making one waits for its ranks: all ranks make them in one order.
  for (const Group& group : agreed_order(groups)) {
    auto& list = roles[key_of(group)];
    std::sort(list.begin(), list.end());
    for (const Role role : list) get(group, role);
  }
  const auto links = [&](const Domain& d, Role data, Role replicas) {
    return DomainLinks{get(d.group, data), d.replicas ? get(*d.replicas, replicas) : nullptr,
                       d.averaged_over};
  };
  norm = get(all.mesh, norm_role);
  home = links(home_domain, Role::kData, Role::kReplicas);
  for (const Domain& d : all.list) {
    domains.push_back(links(d, Role::kData, Role::kReplicas));
    if (!all.uniform) agreements_.push_back(links(d, Role::kAgreement, Role::kAgreement));
  }
}

void OptimizerLinks::check_each_domain(const std::function<void(int64_t, Communicator&)>& check) {
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
  check_construction(*control, problem, {});
}

void OptimizerLinks::check_domains(const Domains& all,
                                   const std::function<std::vector<std::string>(int64_t)>& lines) {
  if (all.uniform) return;
  check_each_domain(
      [&](int64_t domain, Communicator& group) { check_construction(group, "", lines(domain)); });
}

void OptimizerLinks::agree_on_half(const Domains& all, bool half_here) {
  any_half = half_here;
  if (all.uniform) return;
  at::Tensor word = at::empty({1}, at::TensorOptions().dtype(at::kInt));
  word.fill_(half_here ? 1 : 0);
  control->all_reduce_max(word, "whether any parameter is fp16").wait();
  any_half = word.item<int32_t>() != 0;
}

void OptimizerLinks::agree_used(const std::vector<int64_t>& domain_of, std::vector<uint8_t>& used) {
  std::vector<std::vector<size_t>> members(agreements_.size());
  for (size_t p = 0; p < domain_of.size(); ++p) members[domain_of[p]].push_back(p);
  std::vector<at::Tensor> flags;
  for (const auto& list : members) {
    flags.push_back(
        at::empty({static_cast<int64_t>(list.size())}, at::TensorOptions().dtype(at::kInt)));
    auto* words = flags.back().mutable_data_ptr<int32_t>();
    for (size_t i = 0; i < list.size(); ++i) words[i] = used[list[i]];
  }
  // First within every domain, then between those results and the replicas'.
  for (Communicator* DomainLinks::*link : {&DomainLinks::data, &DomainLinks::replicas}) {
    std::vector<Pending> pending;
    for (size_t d = 0; d < agreements_.size(); ++d) {
      Communicator* group = agreements_[d].*link;
      if (group == nullptr || members[d].empty()) continue;
      pending.push_back(group->all_reduce_max(flags[d], "used parameters"));
    }
    for (Pending& p : pending) p.wait();
  }
  for (size_t d = 0; d < members.size(); ++d) {
    const auto* words = flags[d].const_data_ptr<int32_t>();
    for (size_t i = 0; i < members[d].size(); ++i) {
      used[members[d][i]] = static_cast<uint8_t>(words[i]);
    }
  }
}

std::string OptimizerLinks::failed() const {
  std::string text = control->failed();
  for (const auto& item : made_) {
    if (text.empty()) text = item.second->failed();
  }
  return text;
}

void OptimizerLinks::abort_data() noexcept {
  for (const auto& item : made_) item.second->abort();
}

void OptimizerLinks::abort() noexcept {
  abort_data();
  control->abort();
}

Traffic OptimizerLinks::data_traffic() const {
  Traffic sum;
  for (const auto& [key, communicator] : made_) {
    if (key.second != Role::kAgreement) add(communicator->traffic(), sum);
  }
  return sum;
}

Traffic OptimizerLinks::control_traffic() const {
  Traffic sum = control->traffic();
  for (const auto& [key, communicator] : made_) {
    if (key.second == Role::kAgreement) add(communicator->traffic(), sum);
  }
  return sum;
}

}  // namespace zero
