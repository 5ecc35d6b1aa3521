// SPDX-FileCopyrightText: The zero authors
// SPDX-License-Identifier: Apache-2.0
#include "zero/optimizer/mesh_description.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "zero/agreement/all_or_none.h"
#include "zero/base/error_text.h"
#include "zero/checkpoint/differences.h"
#include "zero/checkpoint/format/hashed_file.h"
#include "zero/inner_optimizers/registry.h"
#include "zero/training/broadcasts.h"
#include "zero/training/group_layouts.h"

namespace zero {
namespace {

int64_t norm_copies_of(const ZeroOptions& options, int64_t group) {
  const auto found = options.placements().find(group);
  if (found == options.placements().end()) return 1;
  return found->second.owner() ? found->second.copies() : 0;
}

uint64_t bytes_hash(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().cpu().contiguous();
  return content_hash(host.const_data_ptr(), host.nbytes());
}

// As manifests name it; nothing for fp32.
std::string format_name(Moments moments) {
  static constexpr const char* kNames[] = {"", "bfloat16", "int8"};
  return kNames[static_cast<size_t>(moments)];
}

// Sets which part of its tensor this rank holds. Throws for a dimension that the tensor does not
// have.
void set_part(HeldTensor& held, const ZeroOptions& options) {
  const auto& cut = options.tensor_parts();
  if (!cut || cut->group.world_size() == 1) return;
  const std::string& name = held.about.name;
  const std::optional<int64_t> dimension = cut->dimension(name);
  if (!dimension) return;
  const auto dimensions = static_cast<int64_t>(held.about.shape.size());
  TORCH_CHECK(0 <= *dimension && *dimension < dimensions, "tensor_parts(): tensor ", name,
              ": expected one of its ", dimensions, " dimensions, got ", *dimension);
  held.part = cut->group.rank();
  held.parts = cut->group.world_size();
  held.dimension = *dimension;
  if (cut->sections) held.sections = cut->sections(name);
  if (held.sections.size() == 1) held.sections.clear();
}

// Whether ranks hold different tensors (experts, pipeline stages) or parts of tensors. A checkpoint
// of such a mesh has the tensors of all ranks, each name or each part of one once.
bool needs_merge(const Engine& engine) {
  const auto& parts = engine.options.tensor_parts();
  return !engine.domains.uniform || (parts && parts->group.world_size() > 1);
}

// Describes tensors that are not optimized, which all ranks of the home group hold.
std::vector<HeldTensor> describe_whole(const Engine& engine, const std::vector<NamedTensor>& list,
                                       bool hashed) {
  const Group& home = engine.domains.home;
  std::vector<HeldTensor> result;
  for (size_t i = 0; i < list.size(); ++i) {
    if (static_cast<int>(i % home.world_size()) != home.rank()) continue;
    const NamedTensor& item = list[i];
    HeldTensor held{described(item), static_cast<int64_t>(i),
                    first_rank_of(home, engine.domains.mesh),
                    /*norm_copies=*/0};
    if (hashed) held.hash = bytes_hash(item.tensor);
    set_part(held, engine.options);
    result.push_back(std::move(held));
  }
  return result;
}

// This rank's share of what its sets of ranks describe: of n ranks that share a parameter group,
// rank r describes every n-th parameter. `groups` have the present options. `hashes`: those of
// frozen parameters too.
HeldTensors describe_held(const Engine& engine, const Engine::ParamGroups& groups, bool hashes) {
  const ShardDomains& domains = engine.domains;
  const std::vector<Parameter>& parameters = engine.table.parameters();
  HeldTensors held;
  std::vector<ManifestParameter> managed = managed_parameters(engine.table, engine.options);
  bool is_first = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int64_t group = parameters[i].group;
    const ShardDomain& domain = domains.list[domains.of_group[group]];
    if (domain.replicas && domain.replicas->rank() != 0) continue;
    is_first = is_first || domain.group.rank() == 0;
    if (static_cast<int>(i % domain.group.world_size()) != domain.group.rank()) continue;
    held.parameters.push_back({std::move(managed[i]), static_cast<int64_t>(i),
                               first_rank_of(domain.group, domains.mesh),
                               norm_copies_of(engine.options, group)});
    set_part(held.parameters.back(), engine.options);
  }
  held.frozen = describe_whole(engine, engine.table.unmanaged(), hashes);
  held.buffers = describe_whole(engine, engine.table.buffers(), /*hashed=*/false);
  if (is_first) {
    for (const auto& g : groups)
      held.groups.push_back(adapter_of(g.options()).option_values(g.options()));
  }
  return held;
}

}  // namespace

int64_t first_rank_of(const Group& group, const Group& mesh) {
  const std::vector<int>& ranks = mesh.global_ranks();
  const auto first = std::find(ranks.begin(), ranks.end(), group.global_ranks().front());
  TORCH_INTERNAL_ASSERT(first != ranks.end(), "a group of the mesh");
  return first - ranks.begin();
}

std::vector<ManifestParameter> managed_parameters(const ParameterTable& table,
                                                  const ZeroOptions& options) {
  const std::vector<Moments> moments = parameter_moments(table, options);
  std::vector<ManifestParameter> result;
  for (const Parameter& p : table.parameters()) {
    ManifestParameter& about = result.emplace_back(described(p));
    about.moments = format_name(moments[result.size() - 1]);
    if (options.split_masters() && about.dtype == at::kBFloat16) about.master = "split";
  }
  return result;
}

std::string whole_text(const ParameterTable& table) {
  return shapes_of(table.unmanaged()) + ", " + shapes_of(table.buffers());
}

std::vector<std::string> whole_arguments(const Engine& engine, bool protects) {
  if (!needs_merge(engine) && !protects) return {};
  return engine.protocol.at_home(whole_text(engine.table)).by_domain;
}

std::unique_ptr<MeshTensors> merge_tensors(Engine& engine, const std::string& what,
                                           const Engine::ParamGroups& groups, bool values) {
  if (!needs_merge(engine)) return nullptr;
  const auto texts = run_on_all_ranks(*engine.comms->control, what, [&] {
    return held_text(describe_held(engine, groups, values));
  });
  const auto& cut = engine.options.tensor_parts();
  std::vector<HeldTensors> held;
  for (size_t r = 0; r < texts.size(); ++r) {
    held.push_back(parse_held(texts[r], "tensors of rank " + std::to_string(r)));
  }
  try {
    return std::make_unique<MeshTensors>(held, cut ? cut->group.rank() : 0);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "rank ", engine.comms->rank(), ": ", what, ": ", error_text(error));
  }
}

}  // namespace zero
