// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "zero/comm/group_order.h"
#include "zero/norm/norm_accumulator.h"
#include "zero/norm/scale_gradients.h"

namespace zero {
namespace {

// Every message has two numbers, whether or not a rank has both kinds, since peers may.
enum Kind : int64_t { kDense, kExpert, kKinds };

using SetKey = std::vector<GroupKey>;

SetKey key_of(const std::vector<Group>& groups) {
  SetKey key;
  for (const Group& group : groups) key.push_back(key_of(group));
  return key;
}

void check_placement(const Placement& placement, size_t index) {
  std::map<int, std::string> ranks;
  for (const auto* list : {&placement.sharded_over(), &placement.replicated_over()}) {
    for (const Group& group : agreed_order(*list)) {
      for (const int rank : group.global_ranks()) {
        if (rank == group.global_rank()) continue;
        const auto [found, added] = ranks.try_emplace(rank, group.name());
        TORCH_CHECK(added, "parameter ", index,
                    " of group_parameters_for_norm: expected groups that share only this rank, ",
                    group.global_rank(), ", got \"", found->second, "\" and \"", group.name(),
                    "\", which both contain rank ", rank,
                    "; name each dimension of the mesh once, as sharded or as replicated");
      }
    }
  }
}

c10::ScalarType gradient_dtype(const at::Tensor& tensor) {
  return tensor.grad().defined() ? tensor.grad().scalar_type() : tensor.scalar_type();
}

std::vector<at::Tensor> gradients_of(const GradNormGroup& group) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : group.parameters) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients;
}

// All groups of parameters that need the same reduction.
struct ReductionSet {
  std::vector<Group> groups;
  std::vector<const GradNormGroup*> members;
  at::Tensor parts;  // [kKinds, width], on the device that the messages are sent from
  Pending pending;
};

std::vector<ReductionSet> reduction_sets(const std::vector<GradNormGroup>& groups) {
  std::map<SetKey, ReductionSet> sets;
  for (const GradNormGroup& group : groups) {
    const std::vector<Group> order = agreed_order(group.sharded_over);
    ReductionSet& set = sets[key_of(order)];
    set.groups = order;
    set.members.push_back(&group);
  }
  std::vector<ReductionSet> result;
  for (auto& item : sets) result.push_back(std::move(item.second));
  // The empty set, which sends nothing, is the first of the map: it is measured last.
  if (!result.empty() && result.front().groups.empty()) {
    std::rotate(result.begin(), result.begin() + 1, result.end());
  }
  return result;
}

Communicator& norm_communicator(const Group& group) {
  return *group.shared_communicator("norm", Purpose::kData);
}

// Before anything is sent, since making one waits for the peers.
void make_communicators(const std::vector<ReductionSet>& sets,
                        const std::optional<Group>& pipeline_group) {
  std::vector<Group> all;
  for (const ReductionSet& set : sets) all.insert(all.end(), set.groups.begin(), set.groups.end());
  if (pipeline_group) all.push_back(*pipeline_group);
  for (const Group& group : agreed_order(all)) norm_communicator(group);
}

void measure_locally(ReductionSet& set, double norm_type) {
  const at::Device device =
      set.groups.empty() ? set.members.front()->device : set.groups.front().device();
  set.parts = empty_norm_parts(kKinds, norm_type, device);
  for (const GradNormGroup* group : set.members) {
    if (!group->owner) continue;
    const at::Tensor part = set.parts.select(0, group->expert ? kExpert : kDense);
    if (group->device == device) {
      add_to_norm_part(part, gradients_of(*group), norm_type);
    } else {
      at::Tensor both = empty_norm_parts(2, norm_type, group->device);
      add_to_norm_part(both.select(0, 0), gradients_of(*group), norm_type);
      both = both.to(device);
      both.select(0, 1).copy_(part);
      part.copy_(combine_norm_parts(both));
    }
  }
}

void start_reduction(ReductionSet& set, size_t group) {
  set.pending =
      all_reduce_norm_parts(set.parts, norm_communicator(set.groups[group]), "gradient norm");
  // NCCL needs one order of the collectives of several communicators on the devices of all ranks:
  // each begins behind what the current stream waits for. See
  // zero/comm/exchange/collective_order.h.
  if (!set.parts.is_cpu()) set.pending.wait();
}

// [kKinds, width] over all sets, on `device`.
at::Tensor reduce_sets(std::vector<ReductionSet>& sets, double norm_type, at::Device device) {
  size_t most = 0;
  for (ReductionSet& set : sets) {
    measure_locally(set, norm_type);
    if (!set.groups.empty()) start_reduction(set, 0);
    most = std::max(most, set.groups.size());
  }
  for (size_t g = 0; g < most; ++g) {
    for (ReductionSet& set : sets) {
      if (g < set.groups.size()) set.pending.wait();
    }
    for (ReductionSet& set : sets) {
      if (g + 1 < set.groups.size()) start_reduction(set, g + 1);
    }
  }
  if (sets.size() == 1) return sets.front().parts.to(device);  // one mesh: nothing to add up
  at::Tensor kinds = empty_norm_parts(kKinds, norm_type, device);
  for (int64_t kind = 0; kind < kKinds; ++kind) {
    at::Tensor rows = empty_norm_parts(static_cast<int64_t>(sets.size()) + 1, norm_type, device);
    for (size_t s = 0; s < sets.size(); ++s) {
      rows.select(0, static_cast<int64_t>(s)).copy_(sets[s].parts.select(0, kind));
    }
    kinds.select(0, kind).copy_(combine_norm_parts(rows));
  }
  return kinds;
}

}  // namespace

std::vector<GradNormGroup> group_parameters_for_norm(const std::vector<NormParameter>& parameters) {
  using Key = std::tuple<bool, SetKey, bool, bool, int, int, c10::ScalarType>;
  std::map<Key, GradNormGroup> groups;
  std::set<const void*> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [tensor, placement] = parameters[i];
    check_placement(placement, i);
    GradNormGroup group;
    group.sharded_over = agreed_order(placement.sharded_over());
    group.expert = placement.expert();
    group.owner = placement.owner();
    if (tensor.defined()) {
      TORCH_CHECK(at::isFloatingType(tensor.scalar_type()), "parameter ", i,
                  " of group_parameters_for_norm: expected a real floating dtype, got ",
                  tensor.scalar_type());
      TORCH_CHECK(seen.insert(tensor.unsafeGetTensorImpl()).second, "parameter ", i,
                  " of group_parameters_for_norm, of shape ", tensor.sizes(),
                  ": expected once, given twice; list tied parameters of one rank once");
      group.device = tensor.device();
      group.dtype = gradient_dtype(tensor);
    } else if (!group.sharded_over.empty()) {
      group.device = group.sharded_over.front().device();
    } else {
      continue;  // no rank waits for it
    }
    // Sharded groups come first, as their messages do.
    const Key key{group.sharded_over.empty(),
                  key_of(group.sharded_over),
                  group.expert,
                  group.owner,
                  static_cast<int>(group.device.type()),
                  group.device.index(),
                  group.dtype};
    GradNormGroup& entry = groups.try_emplace(key, std::move(group)).first->second;
    if (tensor.defined()) entry.parameters.push_back(tensor);
  }
  std::vector<GradNormGroup> result;
  for (auto& item : groups) result.push_back(std::move(item.second));
  return result;
}

at::Tensor clip_grad_norm_(const std::vector<GradNormGroup>& groups, std::optional<double> max_norm,
                           double norm_type, const std::optional<Group>& pipeline_group) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!max_norm || *max_norm > 0, "max_norm: expected a number above 0, got ", *max_norm,
              "; pass nullopt to measure only");
  TORCH_CHECK(norm_type > 0, "norm_type: expected a number above 0 or infinity, got ", norm_type);
  std::vector<ReductionSet> sets = reduction_sets(groups);
  make_communicators(sets, pipeline_group);
  const at::Device device = groups.empty() ? at::Device(at::kCPU) : groups.front().device;
  at::Tensor kinds = reduce_sets(sets, norm_type, device);
  if (pipeline_group && pipeline_group->world_size() > 1) {
    kinds = kinds.to(pipeline_group->device());
    all_reduce_norm_parts(kinds, norm_communicator(*pipeline_group), "gradient norm of all stages")
        .wait();
    kinds = kinds.to(device);
  }
  const at::Tensor norm = norm_of(combine_norm_parts(kinds), norm_type);
  if (max_norm) {
    const bool host = std::all_of(groups.begin(), groups.end(),
                                  [](const GradNormGroup& g) { return g.device.is_cpu(); });
    for (const GradNormGroup& group : groups) {
      scale_by_norm(gradients_of(group), *max_norm, norm, host);
    }
  }
  return norm;
}

}  // namespace zero
